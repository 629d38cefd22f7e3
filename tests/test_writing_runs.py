"""The writing domain in whole runs: no tests, no sandbox, and nothing in their place."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from comlrl.files import read_lines
from comlrl.rewards.writing.writing_reward import GREATEST
from tests.support.documented import Row, documented
from tests.support.runs import ROOT, SMALL, Zygote, metrics, newest_step

CONFIG = ROOT / "configs/magrpo_writing_quickstart.yaml"
CODE_WORDS = ("pass_rate", "pass@", "test_fraction", "syntax", "programming", "helper")


def small(folder: Path, **section: object) -> list[str]:
    """Arguments for the quickstart in seconds; of 24 tokens some are 8 words. ``section``: more."""
    keys = {"max_new_tokens": 24, "num_generations": 4} | section
    settings = {f"magrpo.{name}": value for name, value in (SMALL | keys).items()}
    settings |= {"output.dir": str(folder), "lora.r": 4}
    return [
        "--config", str(CONFIG), "--override",
        *(f"{key}={json.dumps(value)}" for key, value in settings.items()),
    ]  # fmt: skip


THREE = {"num_agents": 3, "num_turns": 2, "num_generations": 2}
PLAIN = ["external.mode=plain"]


@pytest.fixture(scope="module")
def two(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two small runs that differ in their seeds alone."""
    folders = [tmp_path_factory.mktemp("writing") / str(seed) for seed in (1, 2)]
    runs = [zygote.run("magrpo", [*small(folder), f"seed={folder.name}"]) for folder in folders]
    for run in runs:
        assert run.wait() == 0, run.output
    return folders


def test_a_run_tells_its_parts_and_nothing_of_code(two):
    (folder, _) = two
    records = metrics(folder)
    for record in records:
        values = record["metrics"]
        parts = [values[f"reward/{name}"] for name in ("structure", "style", "coherence")]
        assert sum(parts) == pytest.approx(values["reward_mean"])
        assert 0 <= values["reward_mean"] <= GREATEST
        assert {"similarity", "transition_kinds", "words/concise", "words/detailed"} <= set(values)
        assert not [n for n in values if any(word in n for word in ("aux", *CODE_WORDS))]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["eval_end"]["reward_mean"] == records[-1]["metrics"]["reward_mean"]
    assert not [name for name in summary["eval_end"] if name.startswith("pass")]
    samples = list(read_lines(folder / "samples.jsonl"))
    assert samples and all("TL;DR:" in json.dumps(sample) for sample in samples)
    for file in ("report.html", "final_model/README.md"):
        text = (folder / file).read_text()
        assert not [word for word in CODE_WORDS if word in text], file


def test_what_is_logged_is_documented_and_the_other_way_round(two):
    page = (ROOT / "docs/writing.md").read_text()
    own = re.findall(r"^\| `([^`]+)` \| turn \|", page, re.M)
    named = [Row(name, True, False, None).pattern(r"(turn_\d+/)?") for name in own]
    patterns = [p.pattern.replace("ROLE", r"\w+") for p in named]
    general = [r.pattern() for r in documented() if r.who is None or "magrpo" in r.who]
    names = {name for record in metrics(two[0]) for name in record["metrics"]}
    for pattern in patterns:
        assert any(re.fullmatch(pattern, name) for name in names), pattern
    for name in names:
        known = any(re.fullmatch(pattern, name) for pattern in patterns)
        assert known or any(pattern.fullmatch(name) for pattern in general), name


@pytest.mark.slow
def test_three_writers_revise_and_go_on_after_a_stop(zygote, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    undisturbed = zygote.run("magrpo", [*small(whole, **THREE), *PLAIN])
    run = zygote.run("magrpo", [*small(stopped, **THREE), *PLAIN])
    run.until(lambda: newest_step(stopped) > 0)
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.output
    run = zygote.run("magrpo", [*small(stopped, **THREE), *PLAIN, "--resume"])
    assert run.wait() == 0 and undisturbed.wait() == 0, run.output + undisturbed.output
    assert metrics(stopped) == metrics(whole)
    last = metrics(whole)[-1]["metrics"]
    assert {"turn_1/reward/style", "turn_2/reward/style", "words/detailed2"} <= set(last)


def test_writers_that_act_one_after_the_other(zygote, tmp_path):
    """The domain refuses a team of one, and nothing takes one agent's node for such a team."""
    folder = tmp_path / "run"
    zygote.finish("magrpo", small(folder, turn_order="sequential", max_steps=1, eval_interval=1))
    assert [line["phase"] for line in metrics(folder)] == ["eval", "train", "eval"]
    assert (folder / "report.html").is_file()


def test_teams_of_other_sizes_are_refused(zygote, tmp_path):
    for size in (1, 9):
        run = zygote.finish("magrpo", small(tmp_path / "run", num_agents=size), code=2)
        line = run.output.strip().splitlines()[-1]
        assert line.startswith("error: ") and f"magrpo.num_agents: {size}; " in line
    assert not (tmp_path / "run").exists()


def test_evaluation_and_cross_play(two, tmp_path, capsys):
    import evaluate

    few = ["--override", "magrpo.eval_num_samples=3"]
    out = tmp_path / "one.json"
    assert evaluate.main(["--checkpoint", str(two[0]), "--out", str(out), *few]) == 0
    result = json.loads(out.read_text())
    assert "reward/structure" in result["intervals"]
    names = [*result["metrics"], *result["intervals"], *result["per_task"][0]]
    assert not [name for name in names if any(word in name for word in (*CODE_WORDS, "passed"))]
    out = tmp_path / "two.json"
    assert evaluate.main(["--cross-play", *map(str, two), "--out", str(out), *few]) == 0
    matrices = json.loads(out.read_text())["matrices"]
    assert "reward_mean" in matrices and not [name for name in matrices if "pass" in name]
    shown = capsys.readouterr().out
    assert not [word for word in CODE_WORDS if word in shown]


@pytest.mark.parametrize("baseline", ["naive_concat", "sequential", "discussion"])
def test_baselines(baseline, tmp_path):
    import evaluate

    out = tmp_path / "baseline.json"
    settings = ["magrpo.eval_num_samples=2", "magrpo.max_new_tokens=16"]
    asked = ["--config", str(CONFIG), "--baseline", baseline, "--out", str(out)]
    assert evaluate.main([*asked, "--override", *settings]) == 0
    assert 0 <= json.loads(out.read_text())["metrics"]["reward_mean"] <= GREATEST


def test_a_baseline_of_a_size_that_the_domain_lacks_is_refused(capsys):
    import evaluate

    assert evaluate.main(["--config", str(CONFIG), "--baseline", "single"]) == 2
    assert capsys.readouterr().err == (
        "error: --baseline: 'single' has a team of 1, but summaries that add to each other need 2 "
        "to 8 agents; choose another baseline\n"
    )
