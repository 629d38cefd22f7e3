"""Runs of a user's own algorithm, evaluated in a process that has never seen its train script."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import yaml

from comlrl.config import algorithms as configs
from comlrl.errors import UserError
from comlrl.trainers.launch.commands import export
from comlrl.trainers.launch.commands.evaluation_plan import make_plan, parse_arguments
from comlrl.trainers.launch.wiring import init_from, own_algorithm, weights
from tests.support.processes import python
from tests.support.tiny_models import config


@dataclass(frozen=True)
class OwnConfig(configs.PPOConfig):
    """A custom critic, with other defaults."""

    temperature: float | None = 0.6
    shared_policy: bool = True
    horizon: int = 3
    weights: list[float] = field(default_factory=lambda: [1.0, 0.5])
    paper: ClassVar[str] = "nobody's"


@dataclass(frozen=True)
class OneConfig(configs.CommonConfig):
    @property
    def one_policy(self) -> bool:
        return True


@dataclass(frozen=True)
class Best(configs.MAGRPOConfig):
    least: float = 1.0


def run_of(folder, name="own", section=None):
    """What a run leaves of its configuration, and a checkpoint that nothing is read of here."""
    section = section or OwnConfig(num_agents=2, critic="independent", horizon=7)
    made = config("ppo", num_agents=2)
    made = replace(made, algorithm=name, sections={name: section})
    for index in range(section.policies):
        (folder / "final_model" / f"agent_{index}").mkdir(parents=True)
    own_algorithm.keep(folder, name, type(section))
    (folder / "config.yaml").write_text(yaml.safe_dump(made.to_dict(), sort_keys=False))
    return folder


def plan(*words: str):
    return make_plan(parse_arguments(list(words)))


def test_a_run_is_read_with_its_own_keys_and_defaults_and_no_script(tmp_path):
    run = run_of(tmp_path / "run")
    assert "own" not in configs.SECTIONS
    section = plan("--checkpoint", str(run)).config.section
    assert (section.horizon, section.temperature, section.weights) == (7, 0.6, [1.0, 0.5])
    assert isinstance(section, configs.PPOConfig) and section.one_policy and section.policies == 1
    assert "own" not in configs.SECTIONS  # nothing stays registered

    (tmp_path / "short.yaml").write_text("own:\n  num_agents: 2\n  horizon: 4\n")
    given = plan("--config", str(tmp_path / "short.yaml"), "--checkpoint", str(run))
    assert (given.config.section.temperature, given.config.section.horizon) == (0.6, 4)
    untrained = plan("--config", str(run / "config.yaml"), "--baseline", "single")
    assert untrained.config.algorithm == "own"


def test_a_run_of_one_is_crossed_replaced_exported_and_started_from(tmp_path):
    first = run_of(tmp_path / "a", "best", Best())
    second = run_of(tmp_path / "b", "best", Best(turn_order="sequential"))
    sequential = ("--override", "best.turn_order=sequential")
    crossed = plan("--cross-play", str(first), str(second), *sequential)
    assert [team.run_dir for team in crossed.teams] == [first, second]
    with pytest.raises(UserError, match="turn_order"):
        plan("--cross-play", str(first), str(second))
    shutil.copytree(first, tmp_path / "c")
    assert plan("--checkpoint", str(first), "--replace", f"0={tmp_path / 'c'}").replaced
    assert export.check(str(first), None, False, None)[0].run_dir == first
    assert init_from.read_source(str(first), (), tmp_path).agents == 2


def test_facts_of_the_section_that_are_no_keys_are_kept(tmp_path):
    run = run_of(tmp_path / "run", "one", OneConfig())
    section = plan("--checkpoint", str(run), "--num-agents", "3").config.section
    assert isinstance(section, OneConfig)
    assert section.one_policy and section.policies == 1 and section.num_agents == 3


def test_runs_of_shipped_algorithms_keep_nothing_more(tmp_path):
    own_algorithm.keep(tmp_path, "ppo", configs.PPOConfig)
    assert list(tmp_path.iterdir()) == []
    assert own_algorithm.all_sections(tmp_path, None) == configs.SECTIONS


SCRIPT = """
from dataclasses import dataclass
from comlrl.config.algorithms import MAGRPOConfig

@dataclass(frozen=True)
class Scripted(MAGRPOConfig):
    least: float = 2.0

if __name__ == "__main__":
    import sys
    from pathlib import Path
    from comlrl.trainers.launch.wiring.own_algorithm import keep
    keep(Path(sys.argv[1]), "scripted", Scripted)
"""


def test_a_class_of_the_script_itself_is_found_in_a_copy_of_it(tmp_path):
    script, run = tmp_path / "train-it.py", tmp_path / "run"
    script.write_text(SCRIPT)
    run.mkdir()
    python(script, run)
    script.unlink()
    (run / "config.yaml").write_text("scripted: {least: 3}\n")
    section = weights.load_run(run).section
    assert (section.least, type(section).__name__) == (3.0, "Scripted")


def test_a_run_with_older_spellings_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model: {name: builtin:tiny-coder}\n"
        "magrpo: {agent_learning_rate: 0.5, joint_mode: crossed}\n"
    )
    run = weights.load_run(tmp_path)
    assert (run.section.learning_rate, run.section.joint_mode) == (0.5, "cross")
    facts = weights.of_run(run)
    assert facts["agent_model.name"] == "builtin:tiny-coder" and facts["num_agents"] == 2


def test_mistakes_are_reported(tmp_path):
    with pytest.raises(ValueError, match="`ppo` is a shipped"):
        own_algorithm.add("ppo", OwnConfig)
    with pytest.raises(TypeError, match="CommonConfig"):
        own_algorithm.add("own", dict)
    run = run_of(tmp_path / "run")
    for text in ('{"own": ', "[]", '{"own": "json:dumps"}', '{"own": "nowhere:Config"}'):
        (run / own_algorithm.FILE).write_text(text)
        with pytest.raises(UserError, match=r"algorithm\.json'"):
            plan("--checkpoint", str(run))
    (run / own_algorithm.FILE).unlink()
    with pytest.raises(UserError, match=r"no algorithm's section; .* config\.yaml of its run"):
        plan("--checkpoint", str(run))
