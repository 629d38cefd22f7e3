"""evaluate.py on small trained teams: real weights on disk, the real reward, the real files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from comlrl.config.algorithms import SECTIONS
from comlrl.errors import UserError
from comlrl.evaluation.estimates import estimates, pass_at_k, task_rows
from comlrl.evaluation.intervals import bootstrap_interval
from comlrl.loop import checkpoint
from comlrl.models.pretrained import build_team
from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.domain import CODE
from comlrl.rewards.sandbox.outcome import TestOutcome
from comlrl.trainers.launch.commands import evaluate as script
from comlrl.trainers.launch.wiring import replacements
from comlrl.trainers.launch.wiring.assembly import build_rewards, build_sampler
from comlrl.trainers.launch.wiring.weights import locate, run_algorithm
from comlrl.types import JointAction, Reward, Score
from tests.support.fakes import code_task
from tests.support.made_runs import TASK, node, tree
from tests.support.processes import python
from tests.support.runs import state

ROOT = Path(__file__).parents[4]
QUICK = str(ROOT / "configs" / "magrpo_quickstart.yaml")
FEW = ["--override", "magrpo.eval_num_samples=3", "magrpo.max_new_tokens=16", "magrpo.top_p=null"]


def _make_run(folder: Path, seed: int) -> Path:
    """A run directory with a final model and a checkpoint of the same, randomly changed team."""
    config = script.make_plan(
        script.parse_arguments(["--config", QUICK, *FEW, f"seed={seed}", "lora.r=4"])
    ).config
    team = build_team(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for agent in team.agents:
            for parameter in agent.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    team.save(folder / "final_model")
    checkpoint.save(folder, 7, {"loop": {}}, state(team))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [_make_run(folder / f"run_{seed}", seed) for seed in (1, 2)]


def _evaluate(out: Path, *arguments: str, algorithm: str = "magrpo") -> dict:
    if not any("eval_num_samples" in argument for argument in arguments):
        arguments = (*arguments, "--override", f"{algorithm}.eval_num_samples=3")
    assert script.main([*arguments, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def _timeless(metrics: dict, *, need: bool = True) -> dict:
    """The metrics without those of the clock; ``need``: with those of who is needed, which
    ``--replace`` leaves out."""
    dropped = "second" if need else "second|teamwork_rate|needed_rate"
    return {k: v for k, v in metrics.items() if not re.search(dropped, k)}


def test_same_seed_same_numbers_other_seed_others(runs, tmp_path):
    first, again = (_evaluate(tmp_path / "a.json", "--checkpoint", str(runs[0])) for _ in "ab")
    assert _timeless(first["metrics"]) == _timeless(again["metrics"])
    assert first["intervals"] == again["intervals"] and first["per_task"] == again["per_task"]
    assert first["budget"]["tokens_generated"] == again["budget"]["tokens_generated"] > 0
    other = _evaluate(tmp_path / "b.json", "--checkpoint", str(runs[0]), "--override", "seed=9")
    assert other["budget"]["tokens_generated"] != first["budget"]["tokens_generated"]


def test_run_final_model_and_checkpoint_are_the_same_team(runs, tmp_path):
    found = [
        _evaluate(tmp_path / "a.json", "--checkpoint", str(runs[0] / place), "--k", "1,2")
        for place in (".", "final_model", "checkpoints/step_000007")
    ]
    assert found[0]["per_task"] == found[1]["per_task"] == found[2]["per_task"]
    assert found[0]["samples"] == 2 and "pass@2" in found[0]["metrics"]
    table = (tmp_path / "a.md").read_text()
    assert "| pass@2 " in table and "| reward/not_wrapper " in table


def test_weights_bring_their_own_rank_to_another_file(runs, tmp_path):
    """The quickstart says r = 16, the run was trained with r = 4 and says so itself."""
    arguments = ["--checkpoint", str(runs[0]), "--out", str(tmp_path / "a.json")]
    assert (
        script.make_plan(script.parse_arguments([*arguments, "--config", QUICK])).config.lora.r == 4
    )
    own = _evaluate(tmp_path / "own.json", "--checkpoint", str(runs[0]))
    moved = tmp_path / "final_model"  # without the run beside it
    (runs[0] / "final_model").rename(moved)
    try:
        found = _evaluate(
            tmp_path / "a.json", "--checkpoint", str(moved), "--config", QUICK, *FEW, "seed=1"
        )
    finally:
        moved.rename(runs[0] / "final_model")
    assert found["per_task"] == own["per_task"]


def test_cross_play_is_each_pairing_evaluated_apart(runs, tmp_path):
    """Also that an agent is asked once for each sample, not again in every pairing."""
    found = _evaluate(tmp_path / "x.json", "--cross-play", *map(str, runs), "--k", "1,2")
    tokens = 0
    for a, b in itertools.product(range(2), repeat=2):
        mixed = tmp_path / f"mixed_{a}{b}"
        mixed.mkdir()
        (mixed / "agent_0").symlink_to(runs[a] / "final_model" / "agent_0")
        (mixed / "agent_1").symlink_to(runs[b] / "final_model" / "agent_1")
        apart = _evaluate(
            tmp_path / "a.json", "--checkpoint", str(mixed), "--config", QUICK, *FEW, "seed=1",
            "--k", "1,2",
        )  # fmt: skip
        pair = found["matrices"]["reward_mean"][a][b]
        assert pair == pytest.approx(apart["metrics"]["reward_mean"])
        tokens += apart["budget"]["tokens_generated"]
    assert 2 * found["budget"]["tokens_generated"] == tokens
    assert len(set(itertools.chain(*found["matrices"]["reward_mean"]))) > 1
    assert (tmp_path / "x.png").stat().st_size > 5000
    assert "| aux of 2 |" in (tmp_path / "x.md").read_text()


def _of(found: dict, *present: int) -> dict:
    return next(team for team in found["coalitions"] if team["present"] == list(present))


def test_agents_are_replaced_as_if_the_team_had_been_made_so(runs, tmp_path):
    """Every subset of the replaced is the mixed team evaluated apart, and costs what that does."""
    first, second = map(str, runs)
    found = _evaluate(tmp_path / "r.json", "--checkpoint", first, "--replace", f"all={second}")
    crossed = _evaluate(tmp_path / "x.json", "--cross-play", first, second)
    for helper, main in itertools.product((0, 1), repeat=2):
        own = [agent for agent, run in enumerate((helper, main)) if run == 0]
        pair = crossed["matrices"]["reward_mean"][helper][main]
        assert _of(found, *own)["metrics"]["reward_mean"] == pair
    assert found["budget"]["tokens_generated"] == crossed["budget"]["tokens_generated"]
    whole = _evaluate(tmp_path / "a.json", "--checkpoint", first)
    assert _timeless(_of(found, 0, 1)["metrics"]) == _timeless(whole["metrics"], need=False)
    cost = _of(found, 0, 1)["budget"]
    assert cost["model_calls"] == 6 and cost.items() <= whole["budget"].items()
    contribution, matrix = found["contributions"]["reward_mean"], crossed["matrices"]["reward_mean"]
    assert found["replaced"] == {"0": second, "1": second}
    # D of main: v(aux, main) − v(aux).
    gain = matrix[0][0] - matrix[0][1]
    assert contribution["difference_rewards"]["1"]["mean"] == pytest.approx(gain)
    parts = sum(value["mean"] for value in contribution["shapley"].values())
    assert parts == pytest.approx(contribution["together"]["mean"]) == matrix[0][0] - matrix[1][1]
    low, high = contribution["shapley"]["0"]["interval"]
    assert low <= contribution["shapley"]["0"]["mean"] <= high
    assert "| aux " in (tmp_path / "r.md").read_text()


def test_agents_swap_their_places(runs, tmp_path):
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    for agent in (0, 1):
        (swapped / f"agent_{agent}").symlink_to(runs[0] / "final_model" / f"agent_{1 - agent}")
    few = ["--config", QUICK, *FEW, "seed=1"]
    apart = _evaluate(tmp_path / "a.json", "--checkpoint", str(swapped), *few)
    found = _evaluate(tmp_path / "r.json", "--checkpoint", str(runs[0]), "--replace", "0=1", "1=0")
    assert len(found["coalitions"]) == 4
    # This run's own file says 16 tokens and seed 1 too.
    assert _timeless(_of(found)["metrics"]) == _timeless(apart["metrics"], need=False)


def _replaced(asked, *flags: str):
    plan = script.make_plan(script.parse_arguments(["--config", QUICK, *flags]))
    config = plan.config
    return replacements.check(asked.items(), config.section, config.team, plan.work.roles)


def test_agents_are_replaced_by_role():
    assert _replaced({"aux": "main", "main": "silent"}) == {0: 1, 1: "silent"}
    assert _replaced({"main": "0"}) == {1: 0}


def test_more_than_five_agents_are_not_all_replaced():
    with pytest.raises(UserError, match="6 agents are 64 teams"):
        _replaced({"all": "silent"}, "--num-agents", "6")
    assert len(_replaced({str(i): "silent" for i in range(5)}, "--num-agents", "6")) == 5


@pytest.mark.parametrize("start", [None, "RUN"])
def test_the_first_policy_and_silence_take_an_agents_place(runs, tmp_path, start):
    """The first policy is what the run itself started from."""
    given = [] if start is None else [f"init_from={runs[1]}"]
    few = ["--override", "magrpo.eval_num_samples=3", *given]
    first = ["--config", str(runs[0] / "config.yaml")]
    untrained = _evaluate(tmp_path / "u.json", *first, *few)
    run = ["--checkpoint", str(runs[0]), "--replace"]
    found = _evaluate(tmp_path / "r.json", *run, "all=untrained", *few)
    assert _timeless(_of(found)["metrics"]) == _timeless(untrained["metrics"], need=False)
    found = _evaluate(tmp_path / "s.json", *run, "0=silent", *few)
    assert [team["present"] for team in found["coalitions"]] == [[0], []]
    alone = _of(found)
    assert alone["metrics"]["agent_0/completion_length_mean"] == 0
    assert alone["budget"]["model_calls"] == 3 and alone["metrics"]["reward/aux_defined"] == 0


def test_a_team_is_evaluated_in_either_order(runs, tmp_path):
    at_once = _evaluate(tmp_path / "a.json", "--checkpoint", str(runs[0]))
    more = ["magrpo.turn_order=sequential", "magrpo.eval_num_samples=3"]
    ordered = _evaluate(
        tmp_path / "b.json", "--checkpoint", str(runs[0]), "--override", *more,
    )  # fmt: skip
    assert (at_once["turn_order"], ordered["turn_order"]) == ("simultaneous", "sequential")
    assert "1 turn(s), sequential, " in (tmp_path / "b.md").read_text()
    # Agents of one base decode together, unless they act one after the other.
    assert at_once["budget"]["generation_calls"] * 2 == ordered["budget"]["generation_calls"] == 2
    assert at_once["budget"]["scored_joint_actions"] == 3
    assert ordered["budget"]["scored_joint_actions"] == 3
    # The helper reads the same; main reads what the helper wrote.
    name = "agent_{}/completion_length_mean"
    assert ordered["metrics"][name.format(0)] == at_once["metrics"][name.format(0)]
    assert ordered["metrics"][name.format(1)] != at_once["metrics"][name.format(1)]
    # And back: a run that was trained in order, its agents at once.
    folder = _in_order(runs[0], tmp_path / "ordered")
    assert _evaluate(tmp_path / "c.json", "--checkpoint", str(folder))["metrics"].keys()
    again = _evaluate(
        tmp_path / "d.json", "--checkpoint", str(folder), "--override",
        "magrpo.turn_order=simultaneous", "magrpo.eval_num_samples=3",
    )  # fmt: skip
    assert _timeless(again["metrics"]) == _timeless(at_once["metrics"])


def _in_order(run: Path, folder: Path) -> Path:
    """The same run, as if it had been trained in order."""
    shutil.copytree(run, folder)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["magrpo"]["turn_order"] = "sequential"
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def test_teams_are_crossed_in_either_order(runs, tmp_path, capsys):
    ordered = [_in_order(run, tmp_path / run.name) for run in runs]
    crossed = _evaluate(tmp_path / "a.json", "--cross-play", *map(str, ordered))
    assert crossed["turn_order"] == "sequential"
    own = _evaluate(tmp_path / "b.json", "--checkpoint", str(ordered[0]))
    assert crossed["matrices"]["reward_mean"][0][0] == own["metrics"]["reward_mean"]
    mixed = ["--cross-play", str(runs[0]), str(ordered[1])]
    assert script.main(mixed) == 2
    notices = capsys.readouterr().err
    assert "magrpo.turn_order='sequential'" in notices and "'simultaneous'" in notices
    at_once = _evaluate(
        tmp_path / "c.json", *mixed, "--override", "magrpo.turn_order=simultaneous",
        "magrpo.eval_num_samples=3",
    )  # fmt: skip
    assert at_once["turn_order"] == "simultaneous"


def test_greedy_and_a_baseline_need_no_weights(tmp_path):
    greedy = _evaluate(tmp_path / "g.json", "--config", QUICK, *FEW, "--greedy")
    assert greedy["sampling"]["temperature"] == 0 and greedy["checkpoint"] is None
    arguments = ["--config", QUICK, *FEW, "--greedy", "--baseline"]
    concat = _evaluate(tmp_path / "n.json", *arguments, "naive_concat")
    assert concat["per_task"] == greedy["per_task"]  # the untrained team at turn 1
    single = _evaluate(tmp_path / "s.json", *arguments, "single")
    assert single["num_agents"] == 1 and single["metrics"]["reward/aux_defined"] == 0
    assert single["budget"]["tokens_generated"] < concat["budget"]["tokens_generated"]


def test_a_baseline_of_a_program_acts_by_the_domains_roles(tmp_path, capsys):
    config = str(ROOT / "configs" / "magrpo_program_quickstart.yaml")
    few = [*FEW, "sampling.helper.max_new_tokens=4"]
    concat = _evaluate(tmp_path / "p.json", "--config", config, *few, "--baseline", "naive_concat")
    assert concat["roles"] == ["aux", "main"]
    assert concat["metrics"]["agent_0/completion_length_mean"] > 4
    notices = capsys.readouterr().err
    assert "notice: sampling of helper: " in notices


def test_an_untrained_team_may_have_any_size(tmp_path):
    found = _evaluate(tmp_path / "a.json", "--config", QUICK, *FEW, "--num-agents", "3")
    assert found["num_agents"] == 3 and "agent_2/completion_length_mean" in found["metrics"]


@pytest.fixture(scope="module")
def shppo_run(tmp_path_factory) -> Path:
    """A run of two agents that share one policy, randomly changed."""
    folder = tmp_path_factory.mktemp("shppo")
    arguments = ["--config", str(ROOT / "configs" / "shppo_quickstart.yaml"), "--override"]
    small = ["shppo.eval_num_samples=3", "shppo.max_new_tokens=24", "shppo.latent_dim=5"]
    config = script.make_plan(script.parse_arguments([*arguments, *small])).config
    team = build_team(config)
    _, sampler = build_sampler(config, team)
    with torch.no_grad():
        sampler.policy.layer.B.weight += 0.3 * torch.randn_like(sampler.policy.layer.B.weight)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    team.save(folder / "final_model")
    sampler.policy.save(folder / "final_model")
    tensors = {**state(team), "heterogeneous": sampler.policy.state_dict()}
    checkpoint.save(folder, 7, {"loop": {}}, tensors)
    return folder


def test_shppo_acts_with_another_number_of_agents(shppo_run, tmp_path):
    def evaluated(*arguments: str) -> dict:
        return _evaluate(tmp_path / "a.json", *arguments, algorithm="shppo")

    two = evaluated("--checkpoint", str(shppo_run))
    same = evaluated("--checkpoint", str(shppo_run / "checkpoints" / "step_000007"))
    assert two["per_task"] == same["per_task"] and two["num_agents"] == 2
    untrained = evaluated("--config", str(shppo_run / "config.yaml"))
    assert untrained["budget"]["tokens_generated"] != two["budget"]["tokens_generated"]
    three = evaluated("--checkpoint", str(shppo_run), "--num-agents", "3")
    assert three["num_agents"] == 3 and three["metrics"]["agent_2/completion_length_mean"] > 0


def test_a_folder_of_weights_tells_what_its_latents_are(shppo_run, tmp_path):
    """Of a run, or of a final_model alone; older ones do not say, and are learned."""
    alone = tmp_path / "final_model"
    shutil.copytree(shppo_run / "final_model", alone)
    file = alone / "heterogeneous" / "config.json"
    held = json.loads(file.read_text())
    assert held.pop("latents") == "learned"
    for latents, wanted in (({}, "learned"), ({"latents": "zero"}, "zero")):
        file.write_text(json.dumps(held | latents))
        arguments = ["--config", str(ROOT / "configs" / "shppo_quickstart.yaml")]
        plan = script.make_plan(script.parse_arguments(["--checkpoint", str(alone), *arguments]))
        assert plan.config.section.latents == wanted


def test_shppos_weights_need_its_section(shppo_run, capsys):
    arguments = ["--checkpoint", str(shppo_run / "final_model"), "--config", QUICK]
    assert script.main(arguments) == 2
    assert "its section is `magrpo`" in capsys.readouterr().err
    assert script.main(["--cross-play", str(shppo_run), str(shppo_run)]) == 2
    assert "act by one policy" in capsys.readouterr().err
    assert script.main(["--checkpoint", str(shppo_run), "--replace", "0=silent"]) == 2
    assert "act by one policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "RUN", "--num-agents", "3"], "num_agents: 3, but"),
        (["--checkpoint", "RUN", "--override", "magrpo.num_agents=3"], "num_agents: 3, but"),
        (["--checkpoint", "RUN/final_model/agent_0"], "holds one agent of a team"),
        (["--checkpoint", "nowhere"], "--checkpoint: 'nowhere' does not exist"),
        (["--cross-play", "RUN"], "name two runs or more"),
        (["--checkpoint", "RUN", "--k", "0"], "--k: '0'"),
        (["--checkpoint", "RUN", "--k", "5", "--samples", "4"], "needs 5 samples"),
        (["--checkpoint", "RUN", "--greedy", "--samples", "2"], "would be the same"),
        (["--checkpoint", "RUN", "--override", "magrpo.num_turn=2"], "magrpo.num_turns"),
        (["--checkpoint", "RUN", "--baseline", "single"], "not allowed with"),
        (["--baseline", "single"], "--config: missing"),
        (["--config", QUICK, "--replace", "0=silent"], "--replace: needs the run of a team"),
        (["--checkpoint", "RUN", "--replace", "aux"], "--replace: 'aux'; name"),
        (
            ["--checkpoint", "RUN", "--replace", "auxx=silent"],
            "'auxx' is not an agent of this team; did you mean `aux`?",
        ),
        (
            ["--checkpoint", "RUN", "--replace", "aux=mian"],
            "'mian' does not exist, as a run or a role; did you mean `main`?",
        ),
        (["--checkpoint", "RUN", "--replace", "aux=silent", "0=silent"], "names an agent again"),
        (["--checkpoint", "RUN", "--replace", "0=nowhere"], "--replace: 'nowhere' does not exist"),
        (["--checkpoint", "RUN", "--replace", "2=silent"], "there is no agent 2; use 0 to 1"),
        (["--checkpoint", "RUN", "--replace", "0=2"], "there is no agent 2"),
        (["--checkpoint", "RUN", "--replace", "0=0"], "is the team as it is"),
        (["--checkpoint", "RUN", "--replace", "0=1", "all=silent"], "names an agent again"),
    ],
)
def test_mistakes_are_one_line_and_code_2(runs, capsys, arguments, message):
    arguments = [text.replace("RUN", str(runs[0])) for text in arguments]
    assert script.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


PLAY = "program={target: comlrl.rewards.code.write_test_fix:play, agents: [helper, main]}"


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--out", ["--out", "OUT/res.md"]),
        ("--out", ["--out", "OUT/res.PNG"]),
        ("--out", ["--out", "OUT"]),
        ("--out", ["--out", "OUT/file/x.json"]),
        ("--out", ["--out", ""]),
        ("--export-samples", ["--export-samples", "OUT"]),
        ("--export-samples", ["--export-samples", "OUT/file/x.jsonl"]),
        ("--export-samples", ["--export-samples", ""]),
        ("--export-samples", ["--out", "OUT/e.json", "--export-samples", "OUT/new/../e.json"]),
        ("--export-samples", ["--out", "OUT/e.json", "--export-samples", "OUT/e.md"]),
        ("--export-samples", ["--export-samples", "OUT/s.jsonl", "--override", PLAY]),
        ("--episodes", ["--episodes", "OUT"]),
        ("--episodes", ["--out", "OUT/e.json", "--episodes", "OUT/e.md"]),
        ("--episodes", ["--export-samples", "OUT/e.jsonl", "--episodes", "OUT/e.jsonl"]),
        ("--checkpoint", ["--checkpoint", ""]),
        ("--k", ["--k", "99999999999999999999"]),
        ("--k", ["--k", "1,10001"]),
        ("--samples", ["--samples", "0"]),
        ("--samples", ["--samples", "-1"]),
        ("--samples", ["--samples", "10001"]),
    ],
)
def test_files_and_numbers_are_checked_before_anything_is_sampled(tmp_path, option, arguments):
    (tmp_path / "file").touch()
    arguments = [text.replace("OUT", str(tmp_path)) for text in arguments]
    with pytest.raises(UserError, match=f"^{option}: "):
        script.make_plan(script.parse_arguments(["--config", QUICK, *arguments]))


def test_an_empty_config_is_not_the_runs_own(runs):
    with pytest.raises(UserError, match=r"^--config: "):
        script.make_plan(script.parse_arguments(["--checkpoint", str(runs[0]), "--config", ""]))


def test_files_in_a_new_folder_and_the_most_samples_are_planned(tmp_path):
    out = tmp_path / "new" / "e.json"
    arguments = ["--config", QUICK, "--out", str(out), "--k", "1,10000"]
    plan = script.make_plan(script.parse_arguments(arguments))
    assert (plan.out, plan.samples) == (out, 10_000)
    assert list(out.parent.iterdir()) == []


def _like(run: Path, folder: Path, **changes: object) -> Path:
    """A copy of a run, checkpoint only, whose configuration says something else."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("final_model"))
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magrpo__num_agents": 3}, "magrpo.num_agents="),
        ({"agent_model__name": "another"}, "agent_model.name="),
        ({"lora__r": 8}, "lora.r="),
    ],
)
def test_unequal_teams_are_not_crossed(runs, tmp_path, capsys, changes, message, turned):
    """Before: a matrix in which a helper plays main, or a KeyError once models were loaded."""
    other = str(_like(runs[1], tmp_path / "other", **changes))
    pair = [other, str(runs[0])] if turned else [str(runs[0]), other]
    assert script.main(["--cross-play", *pair]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --cross-play: '{pair[1]}' was trained with {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--cross-play", "--replace", "--checkpoint"])
def test_a_run_without_a_whole_checkpoint_is_refused_by_its_option(runs, tmp_path, capsys, option):
    other = _like(runs[1], tmp_path / "other")
    shutil.rmtree(other / "checkpoints")
    (other / "checkpoints/step_000001").mkdir(parents=True)
    words = {
        "--cross-play": ["--cross-play", runs[0], other],
        "--replace": ["--checkpoint", runs[0], "--replace", f"0={other}"],
        "--checkpoint": ["--checkpoint", other],
    }[option]
    assert script.main(list(map(str, words))) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {option}: '{other}'")


WITHOUT_TORCH = "import sys, evaluate; sys.exit(evaluate.main() + 10 * ('torch' in sys.modules))"


def test_refusing_to_cross_loads_nothing_heavy(runs, tmp_path):
    other = _like(runs[1], tmp_path / "other", magrpo__num_agents=3)
    python("-c", WITHOUT_TORCH, "--cross-play", runs[0], other, code=2)


def test_all_of_the_evaluation_split_by_default(runs):
    """The run's own ``eval_num_samples`` is that of its evaluations while it trains."""
    held = yaml.safe_load((runs[0] / "config.yaml").read_text())
    assert held["magrpo"]["eval_num_samples"] == 3
    arguments = ["--checkpoint", str(runs[0])]
    plan = script.make_plan(script.parse_arguments(arguments))
    assert plan.config.section.eval_num_samples is None
    arguments += ["--override", "magrpo.eval_num_samples=5"]
    assert script.make_plan(script.parse_arguments(arguments)).config.section.eval_num_samples == 5


@pytest.mark.parametrize("section", ["marlhf", "magrpo"])
def test_marlhfs_tasks_may_be_given_in_either_section(section):
    config = str(ROOT / "configs" / "marlhf_quickstart.yaml")
    arguments = ["--config", config, "--override", f"{section}.eval_num_samples=5"]
    assert script.make_plan(script.parse_arguments(arguments)).config.section.eval_num_samples == 5


def test_files_tell_what_was_evaluated_and_keep_each_other(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(runs[0], tmp_path / "team")
    few = ["--override", "magrpo.eval_num_samples=1", "magrpo.max_new_tokens=2"]
    for arguments in (
        ["--checkpoint", "team", *few],
        ["--checkpoint", "team", *few],  # the very same: its file is written anew
        ["--checkpoint", "team", *few, "seed=9"],
        ["--checkpoint", "team", *few, "magrpo.discount=0.5"],
        ["--checkpoint", "team", *few, "dataset.eval_split=train[:1]"],
        ["--checkpoint", "team/checkpoints/step_000007", *few],
        ["--config", QUICK, *few],
        ["--config", QUICK, "--baseline", "single", *few],
        ["--cross-play", "team", str(runs[1]), *few],
    ):
        assert script.main(arguments) == 0

    def written(folder: Path) -> list[str]:
        """Names of evaluations, each followed by a digest of what was evaluated."""
        return sorted(path.stem.rpartition("_")[0] for path in folder.glob("evaluation_*.json"))

    assert written(run) == [
        *["evaluation_final_model_coopmini_eval"] * 3,
        "evaluation_final_model_coopmini_train-1",
        "evaluation_step_000007_coopmini_eval",
    ]
    assert written(tmp_path / "outputs") == [
        "evaluation_cross_play_team_x_run_2_coopmini_eval",
        "evaluation_single_tiny-coder_coopmini_eval",
        "evaluation_untrained_tiny-coder_coopmini_eval",
    ]


def test_a_mistake_is_answered_before_torch_loads():
    wrong = ["--config", QUICK, "--override", "magrpo.num_agents=x"]
    done = python("-c", WITHOUT_TORCH, *wrong, code=2)
    assert done.stderr.startswith("error: magrpo.num_agents")


def test_a_run_without_weights_says_how_to_keep_them(tmp_path):
    (tmp_path / "config.yaml").write_text("magrpo: {}\n")
    with pytest.raises(UserError, match="save_final_model=true"):
        locate(tmp_path)


def test_algorithm_of_a_file():
    assert run_algorithm({"seed": 1, "ppo": {}}, SECTIONS, "f") == "ppo"
    assert run_algorithm({"magrpo": {}, "marlhf": {}}, SECTIONS, "f") == "marlhf"
    with pytest.raises(UserError, match="remove all but one"):
        run_algorithm({"ppo": {}, "grpo": {}}, SECTIONS, "f")
    with pytest.raises(UserError, match="no algorithm's section"):
        run_algorithm({"seed": 1}, SECTIONS, "f")


@pytest.mark.parametrize("passed", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed, k):
    samples = [i < passed for i in range(5)]
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(5, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def _chain(task_id: str, *rewards: float):
    """A chain of one joint action a turn."""
    nodes = [
        node([Score(r)], turn=t + 1, parent=t - 1, parent_action=0 if t else -1)
        for t, r in enumerate(rewards)
    ]
    return tree(*nodes, task=dataclasses.replace(TASK, task_id=task_id))


def test_estimates_weigh_a_turn_by_the_chains_that_reached_it():
    trees = [_chain("a", 1.0, 3.0), _chain("a", 2.0), _chain("b", 1.0, 0.0), _chain("b", 1.0, 0.0)]
    metrics, intervals = estimates(trees, CODE, (1,))
    assert metrics["turn_2/reward_mean"] == 1.0  # (3 + 0 + 0) / 3
    # Tasks drawn twice: a and a → 3, a and b → (3 + 0 + 0) / 3 = 1, b and b → 0.
    assert intervals["turn_2/reward_mean"] == (0.0, 3.0)
    assert metrics["reward_mean"] == 1.25 and intervals["reward_mean"] == (0.0, 2.5)
    assert "reward_std" not in intervals and "tasks" not in intervals
    assert task_rows(trees, (1,))[0]["reward_mean"] == 2.5


def test_estimates_weigh_need_by_solved_chains():
    passed = TestOutcome(source="assert f(1)", passed=True)

    def chain(task_id: str, needed: tuple[str, ...]):
        outcomes = (passed,) if needed else ()
        breakdown = RewardBreakdown(helpers=("aux",), needed=needed, outcomes=outcomes)
        task = dataclasses.replace(TASK, task_id=task_id)
        return tree(node([Score(0.0, facts=breakdown)]), task=task)

    trees = [chain("a", ("aux", "f")), chain("a", ()), chain("b", ()), chain("b", ())]
    metrics, intervals = estimates(trees, CODE, (1,))
    # one solved chain in all; tasks drawn without it say nothing
    name = "agent_0/needed_rate"
    assert metrics[name] == 1.0 and metrics["teamwork_rate"] == 0.25
    assert intervals[name] == intervals[f"turn_1/{name}"] == (1.0, 1.0)


def test_an_evaluation_measures_need_and_training_does_not():
    plan = script.make_plan(script.parse_arguments(["--config", QUICK, *FEW, "sandbox.workers=1"]))
    task = code_task("t", "def f(x): ...", "def check(c):\n    assert c(3) == 9\n", "f")
    helper, main = "def aux(x):\n    return x * x\n", "def f(x):\n    return aux(x)\n"
    training, evaluation = build_rewards(plan.work)
    try:
        for reward, needed in ((training, None), (evaluation, ("aux",)), (training, None)):
            (score,) = reward.score([JointAction(task, (helper, main))])
            assert score.passed
            assert score.facts.needed == needed
    finally:
        training.close()


class Constant(Reward):
    """A user's own reward: it has nothing but what ``comlrl.types.Reward`` asks for."""

    def score(self, actions):
        return [Score(0.5) for _ in actions]

    def close(self):
        pass


def test_a_reward_of_ones_own_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "build_rewards", lambda work: (Constant(), Constant()))
    found = _evaluate(tmp_path / "a.json", "--config", QUICK, *FEW)
    assert found["metrics"]["reward_mean"] == 0.5 and "teamwork_rate" not in found["metrics"]


def test_bootstrap_interval_against_a_plain_loop():
    values, generator = np.array([0.0, 1.0, 1.0, 4.0]), np.random.default_rng(5)
    means = []
    for row in generator.integers(4, size=(2000, 4)):
        means.append(sum(values[i] for i in row) / 4)
    means.sort()
    low, high = bootstrap_interval(values, seed=5)
    assert low == pytest.approx(np.percentile(means, 2.5))
    assert high == pytest.approx(np.percentile(means, 97.5))


def test_bootstrap_interval_of_a_negative_seed():
    low, high = bootstrap_interval([0.0, 1.0, 4.0], seed=-1)
    assert 0 <= low < high <= 4


@pytest.mark.slow
def test_evaluating_a_run_gives_what_its_training_ended_with(tmp_path):
    python(
        "train_magrpo.py", "--config", QUICK, "--override",
        f"output.dir={tmp_path}", "magrpo.max_steps=2", "magrpo.batch_size=4",
        "magrpo.num_generations=4", "magrpo.eval_num_samples=6", "magrpo.eval_interval=2",
        "magrpo.eval_answers=2",
    )  # fmt: skip
    ended = json.loads((tmp_path / "summary.json").read_text())["eval_end"]
    twice = ["--samples", "2", "--k", "1,2", "--override", "magrpo.eval_num_samples=6"]
    found = _evaluate(tmp_path / "evaluation.json", "--checkpoint", str(tmp_path), *twice)
    assert _timeless(found["metrics"]) == pytest.approx(_timeless(ended))


def test_samples_are_exported_as_evalplus_reads_them(runs, tmp_path, capsys):
    file = tmp_path / "samples.jsonl"
    words = ["--checkpoint", str(runs[0]), "--samples", "2", "--export-samples", str(file)]
    result = _evaluate(tmp_path / "a.json", *words)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(row.keys() == {"task_id", "solution"} for row in rows)
    names = [row["task_id"] for row in rows]
    task_ids = [task["task_id"] for task in result["per_task"]]
    assert sorted(names) == sorted(task_ids * 2) and len(task_ids) == 3
    for option in ("--export-samples", "--episodes"):
        assert script.main(["--cross-play", *map(str, runs), option, str(file)]) == 2
        assert f"{option}: works for one team" in capsys.readouterr().err


def test_episodes_hold_every_answer_with_its_reward(runs, tmp_path):
    file = tmp_path / "episodes.jsonl"
    words = ["--checkpoint", str(runs[0]), "--samples", "2", "--episodes", str(file)]
    result = _evaluate(tmp_path / "a.json", *words)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2 * len(result["per_task"])
    for task in result["per_task"]:
        rewards = [row["reward"] for row in rows if row["task_id"] == task["task_id"]]
        assert sum(rewards) / 2 == pytest.approx(task["reward_mean"])
    assert all(len(row["prompts_N"]) == len(row["completions_N"]) == 2 for row in rows)
