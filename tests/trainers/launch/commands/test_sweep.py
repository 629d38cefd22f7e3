"""Sweep files and the local sweep: real processes, most of a stand-in for a train script."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from comlrl.errors import UserError
from comlrl.loop.run_lock import hold
from comlrl.trainers.launch.commands import sweep as script
from comlrl.trainers.launch.commands.command_line import parse_arguments, resolve
from comlrl.trainers.launch.commands.search import (
    DEFAULT_COMMAND,
    Sweep,
    begun,
    open_study,
    points,
    read_sweep,
)
from comlrl.trainers.launch.commands.sweep import last_value, write_results
from tests.support.processes import until

ROOT = Path(__file__).parents[4]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
NEEDED = {  # what the four sweeps of the project vary
    "train_magrpo.py": {
        ("magrpo.learning_rate", "magrpo.num_generations"),
        ("magrpo.joint_mode", "magrpo.num_turns", "magrpo.handoff"),
    },
    "train_madpo.py": {("madpo.dpo_beta", "madpo.preference_pairs_per_sample")},
    "train_shppo.py": {("shppo.lambda_e", "shppo.lambda_d")},
}
STAND_IN = """
import json, pathlib, sys, time
items = [i for i in sys.argv[1:] if "=" in i]
given = dict(item.split("=", 1) for item in items)
run = pathlib.Path(given["output.dir"])
(run / "argv.json").write_text(json.dumps(sys.argv[1:]))
(run / "config.yaml").write_text("magrpo: {}")
x, y = float(given["a.x"]), given.get("a.y", "low")
if x == 13:
    print("error: a.x: 13 is unlucky", file=sys.stderr)
    sys.exit(2)
if x == 99 and "--resume" not in sys.argv:
    time.sleep(60)
value = x + (y == "high") + float(given.get("seed", 0))
lines = [{"phase": "eval", "metrics": {"reward_mean": v}} for v in (0.0, value)]
lines.append({"phase": "train", "metrics": {"reward_mean": -1.0}})
lines = [{"step": 8 * i, "update": i} | line for i, line in enumerate(lines)]
(run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


def _sweep_file(folder: Path, parameters: dict, method: str = "grid", **more) -> Path:
    (folder / "train.py").write_text(STAND_IN)
    tree = {
        "program": str(folder / "train.py"),
        "method": method,
        "metric": {"name": "eval/reward_mean", "goal": "maximize"},
        "parameters": parameters,
        "command": ["${env}", "${interpreter}", "${program}", "--override", "${args_no_hyphens}"],
    }
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(tree | more))
    return file


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def states(sweep: Sweep, folder: Path) -> list[str]:
    return [trial.state.name for trial in begun(open_study(sweep, folder), sweep)]


def test_grid_runs_every_point_and_survives_one_that_fails(tmp_path, capsys):
    parameters = {"a.x": {"values": [1, 13, 2]}, "a.y": {"values": ["low", "high"]}}
    file = _sweep_file(tmp_path, parameters)
    assert script.main([str(file), "--dir", str(tmp_path / "s"), "--jobs", "2"]) == 0
    rows = _rows(tmp_path / "s")
    assert [(r["a.x"], r["a.y"], r["eval/reward_mean"]) for r in rows] == [
        ("2", "high", "3.0"), ("1", "high", "2.0"), ("2", "low", "2.0"), ("1", "low", "1.0"),
        ("13", "low", ""), ("13", "high", ""),
    ]  # fmt: skip
    assert rows[-1]["state"] == "failed"
    assert rows[-1]["error"] == "exit code 2: error: a.x: 13 is unlucky"
    assert "point 2 failed: exit code 2: error: a.x: 13" in capsys.readouterr().err
    assert "| eval/reward_mean |" in (tmp_path / "s" / "results.md").read_text()
    assert (tmp_path / "s" / "parallel_coordinates.png").stat().st_size > 5000
    assert "Mean reward, held-out tasks" in (tmp_path / "s" / "comparison.html").read_text()


def test_results_are_averaged_over_the_seeds_of_a_setting(tmp_path):
    parameters = {"seed": {"values": [1, 3]}, "a.x": {"values": [1, 13, 2]}}
    file = _sweep_file(tmp_path, parameters)
    assert script.main([str(file), "--dir", str(tmp_path / "s")]) == 0
    means = (tmp_path / "s" / "results.md").read_text().split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in means]
    assert rows[0] == ["a.x", "eval/reward_mean", "95% interval", "seeds"]
    assert rows[2:] == [["2", "4.000", "3.000 – 5.000", "2"], ["1", "3.000", "2.000 – 4.000", "2"]]


def test_results_replace_the_files_at_once(tmp_path):
    sweep = read_sweep(_sweep_file(tmp_path, {"a.x": {"values": [1]}}))
    study = open_study(sweep, tmp_path)
    files = [tmp_path / "results.csv", tmp_path / "results.md"]
    for file in files:
        file.write_text("old")
    with files[0].open() as table, files[1].open() as page:
        write_results(study, sweep, tmp_path)
        assert table.read() == page.read() == "old"
    assert all("eval/reward_mean" in file.read_text() for file in files)


def test_count_goes_on_where_the_last_call_ended(tmp_path):
    file = _sweep_file(tmp_path, {"a.x": {"values": [1, 2, 3, 4]}})
    arguments = [str(file), "--dir", str(tmp_path / "s"), "--override", "b.z=7"]
    assert script.main([*arguments, "--count", "2"]) == 0
    first = (tmp_path / "s" / "point_000" / "metrics.jsonl").stat().st_mtime_ns
    assert script.main([*arguments, "--count", "3"]) == 0
    assert sorted(r["a.x"] for r in _rows(tmp_path / "s")) == ["1", "2", "3"]
    assert (tmp_path / "s" / "point_000" / "metrics.jsonl").stat().st_mtime_ns == first
    argv = json.loads((tmp_path / "s" / "point_002" / "argv.json").read_text())
    run_dir = f"output.dir={tmp_path}/s/point_002"
    assert argv == ["--override", "a.x=3", "--override", "wandb=null", run_dir, "b.z=7"]
    _sweep_file(tmp_path, {"a.x": {"values": [5]}})
    assert script.main(arguments) == 2  # the folder is another sweep's


def test_a_stopped_sweep_starts_its_interrupted_point_again(tmp_path):
    file = _sweep_file(tmp_path, {"a.x": {"values": [1, 99, 3]}})
    command = [sys.executable, str(ROOT / "sweep.py"), str(file), "--dir", str(tmp_path / "s")]
    process = subprocess.Popen(command, cwd=ROOT)
    until((tmp_path / "s" / "point_001" / "config.yaml").exists, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 130
    assert states(read_sweep(file), tmp_path / "s") == ["COMPLETE", "RUNNING"]
    assert script.main(command[2:]) == 0
    argv = json.loads((tmp_path / "s" / "point_001" / "argv.json").read_text())
    assert argv[-1] == "--resume" and "a.x=99" in argv
    assert [r["a.x"] for r in _rows(tmp_path / "s")] == ["99", "3", "1"]


def test_all_points_failing_is_an_error(tmp_path, capsys):
    file = _sweep_file(tmp_path, {"a.x": {"values": [13, 13]}})
    assert script.main([str(file), "--dir", str(tmp_path / "s")]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"written: {tmp_path}/s/results.md, results.csv\n"
    lines = captured.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "point 0 failed", "point 1 failed", "error",
    ]  # fmt: skip
    assert "all 2 points failed" in lines[-1]
    assert not (tmp_path / "s" / "parallel_coordinates.png").exists()


RANGES = {
    "a.x": {"distribution": "log_uniform_values", "min": 0.01, "max": 100.0},
    "a.n": {"min": 2, "max": 9},
    "a.y": {"values": ["low", "high", None]},
}


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_searches_draw_within_their_ranges_and_go_on_alike(tmp_path, method):
    sweep = read_sweep(_sweep_file(tmp_path, RANGES, method))

    def draw(folder: str, count: int) -> list[dict[str, Any]]:
        study, drawn = open_study(sweep, tmp_path / folder), []
        for number, values in points(study, sweep, count, seed=3):
            drawn.append(dict(values))
            study.tell(number, -abs(float(values["a.x"]) - 1))
        return drawn

    at_once = draw("once", 14)
    in_parts = draw("parts", 5) + draw("parts", 14)
    assert at_once == in_parts
    assert len({str(values) for values in at_once}) == 14
    assert all(0.01 <= values["a.x"] <= 100 for values in at_once)
    assert all(values["a.n"] in range(2, 10) for values in at_once)
    assert {values["a.y"] for values in at_once} <= {"low", "high", "None"}


@pytest.mark.parametrize("method", ["grid", "bayes"])
def test_points_that_a_kill_left_half_drawn_are_drawn_again(tmp_path, method):
    sweep = read_sweep(_sweep_file(tmp_path, {"a.x": {"values": [1, 2, 3]}}, method))
    study = open_study(sweep, tmp_path / "s")
    whole = [dict(values) for _, values in points(open_study(sweep, tmp_path / "w"), sweep, 3, 0)]
    study.ask()  # running, without values
    if method == "grid":
        study.enqueue_trial({"a.x": "1"})  # not yet taken
    drawn = []
    for number, values in points(study, sweep, 3, 0):
        drawn.append((number, dict(values)))
        study.tell(number, 1.0)
    assert drawn == list(enumerate(whole, 1)) and len(whole) == 3


def test_the_state_of_an_earlier_version_is_refused(tmp_path, capsys):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "points.json").write_text("{}")
    file = _sweep_file(tmp_path, {"a.x": {"values": [1]}})
    assert script.main([str(file), "--dir", str(tmp_path / "s")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--dir" in line and "points.json" in line


def test_a_damaged_journal_is_refused(tmp_path, capsys):
    file = _sweep_file(tmp_path, {"a.x": {"values": [1]}})
    assert script.main([str(file), "--dir", str(tmp_path / "s")]) == 0
    journal = tmp_path / "s" / "study.journal"
    journal.write_text("no journal\n" + journal.read_text())
    assert script.main([str(file), "--dir", str(tmp_path / "s")]) == 2
    assert "study.journal" in capsys.readouterr().err


def test_runs_die_with_a_sweep_that_is_killed(tmp_path):
    file = _sweep_file(tmp_path, {"a.x": {"values": [1, 99, 3]}})
    command = [sys.executable, str(ROOT / "sweep.py"), str(file), "--dir", str(tmp_path / "s")]
    process = subprocess.Popen(command, cwd=ROOT)
    until((tmp_path / "s" / "point_001" / "config.yaml").exists, process)
    run_dir = str(tmp_path / "s" / "point_001").encode()
    assert any(run_dir in line for line in _command_lines())
    process.kill()
    process.wait()
    until(lambda: not any(run_dir in line for line in _command_lines()))
    assert script.main(command[2:]) == 0
    assert states(read_sweep(file), tmp_path / "s") == ["COMPLETE"] * 3


def _command_lines() -> list[bytes]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(file.read_bytes())
    return lines


def test_a_folder_is_limited_to_one_sweep_until_that_is_killed(tmp_path, capsys):
    file = _sweep_file(tmp_path, {"a.x": {"values": [99]}})
    folder = tmp_path / "s"
    command = [sys.executable, str(ROOT / "sweep.py"), str(file), "--dir", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT)
    until((folder / "point_000" / "config.yaml").exists, process)
    with hold(folder / "point_000"):  # a run's own lock is another one
        assert script.main(command[2:]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --dir:") and f"process {process.pid}" in line
    assert states(read_sweep(file), folder) == ["RUNNING"]
    process.kill()
    process.wait()
    assert script.main(command[2:]) == 0
    assert states(read_sweep(file), folder) == ["COMPLETE"]


@pytest.mark.parametrize("more", [["--override", "b.z=8"], ["--override", "b.z=7", "--seed", "1"]])
def test_a_sweep_goes_on_only_with_the_same_overrides_and_seed(tmp_path, capsys, more):
    file = _sweep_file(tmp_path, {"a.x": {"values": [1, 2]}})
    arguments = [str(file), "--dir", str(tmp_path / "s")]
    assert script.main([*arguments, "--count", "1", "--override", "b.z=7"]) == 0
    capsys.readouterr()
    assert script.main([*arguments, *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --dir:")
    assert len(_rows(tmp_path / "s")) == 1


def test_duplicate_keys_are_refused(tmp_path):
    file = _sweep_file(tmp_path, {"a.x": {"values": [1]}})
    file.write_text(file.read_text() + "method: random\n")
    with pytest.raises(UserError, match="duplicate key method"):
        read_sweep(file)


def test_a_file_that_holds_only_a_number_is_refused(tmp_path):
    (tmp_path / "sweep.yaml").write_text("5")
    with pytest.raises(UserError, match="sweep file"):
        read_sweep(tmp_path / "sweep.yaml")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"method": "hyperband"}, "method: 'hyperband'"),
        ({"program": "nothing.py"}, "program: 'nothing.py' does not exist"),
        ({"metric": {"name": "reward_mean", "goal": "maximize"}}, "such as eval/reward_mean"),
        ({"parameters": {}}, "parameters: missing"),
        ({"parameters": {"a.x": {"min": 1, "max": 2}}}, "a grid needs `values`"),
        ({"parameters": {"a.x": {"values": []}}}, r"parameters.a.x: {'values': \[\]}"),
        ({"parameters": {"a.x": {"mu": 1, "distribution": "normal"}}}, "parameters.a.x"),
        ({"command": ["${program}", "${args_json}"]}, r"command: '\$\{args_json\}'"),
        ({"metric": "eval/reward_mean"}, "such as eval/reward_mean"),
        ({"parameters": ["a.x"]}, "parameters: missing"),
        ({"method": "random", "parameters": {"a.x": {"min": 2, "max": 1}}}, "parameters.a.x"),
        (
            {"method": "random", "parameters": {"a.x": {"min": 0, "max": 1, "q": "a"}}},
            "parameters.a.x",
        ),
        ({"command": ["${program}", "${args_no_hyphens}"]}, "`--override` with"),
        ({"early_terminate": {"type": "hyperband"}}, "early_terminate: unknown key"),
    ],
)
def test_what_a_local_sweep_cannot_read_is_named(tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        read_sweep(_sweep_file(tmp_path, **{"parameters": {"a.x": {"values": [1]}}} | more))


def test_a_file_without_a_command_names_its_configuration_as_a_parameter(tmp_path):
    tree = yaml.safe_load(_sweep_file(tmp_path, {"a.x": {"values": [1]}}).read_text())
    del tree["command"]
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match=r"parameters\.config"):
        read_sweep(file)
    tree["parameters"]["config"] = {"value": "magrpo_quickstart"}
    file.write_text(yaml.safe_dump(tree))
    line = read_sweep(file).command_line({"a.x": "1", "config": "magrpo_quickstart"}, ["b=2"])
    assert line[-3:] == ["--a.x=1", "--config=magrpo_quickstart", "--b=2"]


def test_a_file_without_a_command_runs_as_wandbs_agent_runs_it(monkeypatch):
    """The overrides of the command line win over the sweep's."""
    monkeypatch.chdir(ROOT)
    tree = yaml.safe_load(SWEEPS[0].read_text())
    point = {"config": "magrpo_quickstart", "magrpo.max_steps": "7", "prompts.prefill": "I choose"}
    sweep = Sweep(
        program=tree["program"], method="grid", metric="eval/reward_mean", maximize=True,
        parameters={}, command=DEFAULT_COMMAND,
    )  # fmt: skip
    line = sweep.command_line(point, ["seed=3", "magrpo.max_steps=5", "magrpo.num_turns=2"])
    config, *_ = resolve("magrpo", parse_arguments("magrpo", line[2:]))
    assert (config.seed, config.section.max_steps, config.section.num_turns) == (3, 5, 2)
    assert config.prompts["prefill"] == "I choose"


def test_mistakes_on_the_command_line_are_one_line(tmp_path, capsys):
    assert script.main([str(tmp_path / "no.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert script.main([str(SWEEPS[0]), "--jobs", "0"]) == 2
    capsys.readouterr()
    folder = tmp_path / "s"
    assert script.main([str(SWEEPS[0]), "--dir", str(folder), "--override", "foo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --override:") and not folder.exists()


def test_the_last_value_of_the_metrics_own_phase(tmp_path):
    lines = [("eval", 1.0), ("train", 5.0), ("eval", 2.0), ("eval", None)]
    (tmp_path / "m").write_text(
        "".join(json.dumps({"phase": p, "metrics": {"r": v}}) + "\n" for p, v in lines)
    )
    assert last_value(tmp_path / "m", "eval/r") == 2.0
    assert last_value(tmp_path / "m", "eval/other") is None
    assert last_value(tmp_path / "none", "eval/r") is None


def test_the_projects_sweeps_are_there_and_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    found: dict[str, set] = {}
    for file in SWEEPS:
        sweep = read_sweep(file)
        found.setdefault(sweep.program, set()).add(tuple(sweep.parameters))
        assert (sweep.metric, sweep.maximize) == ("eval/reward_mean", True)
        line = sweep.command_line({"a.b": "None"})
        assert line[0] == sys.executable and line[-1] == "a.b=None"
        assert "wandb.project=comlrl" in line  # so that the run reports to the sweep
    assert found == NEEDED


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_point_of_the_projects_grids_is_a_configuration(file, monkeypatch):
    """Also those after the first: what a quickstart changes must not contradict what is swept."""
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(file)
    algorithm = sweep.program.removeprefix("train_").removesuffix(".py")
    ends = [
        getattr(p, "choices", None) or (str(p.low), str(p.high)) for p in sweep.parameters.values()
    ]
    for values in itertools.product(*ends):
        point = dict(zip(sweep.parameters, values, strict=True))
        line = sweep.command_line(point)
        given = parse_arguments(algorithm, line[line.index("--config") :])
        config, *_ = resolve(algorithm, given)
        swept = {key.partition(".")[2]: value for key, value in point.items()}
        assert {key: str(getattr(config.section, key)) for key in swept} == swept


@pytest.mark.slow
def test_command_lines_are_those_of_wandbs_agent(monkeypatch):
    """W&B expands ``${args_no_hyphens}`` to ``key=value`` items, None as Python writes it."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    monkeypatch.chdir(ROOT)
    sweep = read_sweep(ROOT / "configs" / "sweeps" / "magrpo_joint_turns_handoff.yaml")
    point = {"magrpo.joint_mode": "align", "magrpo.num_turns": 1, "magrpo.handoff": None}
    theirs = create_sweep_command_args({"args": {k: {"value": v} for k, v in point.items()}})
    ours = sweep.command_line({k: str(v) for k, v in point.items()})
    assert ours[-3:] == theirs["args_no_hyphens"]


ONE_STEP = ("max_steps=1", "batch_size=2", "eval_num_samples=2", "max_new_tokens=24")


def _first_point(file: Path, folder: Path) -> dict[str, Any]:
    """The summary of a sweep file's first point, run with one small training step."""
    tree = yaml.safe_load(file.read_text())
    section = next(iter(tree["parameters"])).partition(".")[0]
    more = [f"{section}.{item}" for item in ONE_STEP]
    if section == "madpo":
        more.append("madpo.preference_num_candidates=4")
    command = [sys.executable, "sweep.py", str(file), "--count", "1", "--dir", str(folder)]
    done = subprocess.run(
        [*command, "--override", *more], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = folder / "point_000" / "log.txt"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    assert float(_rows(folder)[0]["eval/reward_mean"]) >= 0
    return json.loads((folder / "point_000" / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("file", SWEEPS[:2], ids=lambda file: file.stem)
def test_first_point_of_a_sweep_really_trains(file, tmp_path):
    assert _first_point(file, tmp_path)["updates"] >= 1


@pytest.mark.slow
def test_sweep_files_satisfy_wandbs_own_schema(tmp_path):
    """W&B's ``sweeps`` package, in its own environment: it needs an older NumPy."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "sweeps==0.3.0"]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"the sweeps package cannot be installed: {installed.stderr[-200:]}")
    code = (
        "import sys, yaml\n"
        "from sweeps.config import schema_violations_from_proposed_config as check\n"
        "for f in sys.argv[1:]: print(check(yaml.safe_load(open(f))))\n"
    )
    command = [python, "-W", "ignore", "-c", code, *SWEEPS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == ["[]"] * len(SWEEPS)
