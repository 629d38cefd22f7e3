"""What ``evaluate.py`` is asked for: command line → one checked plan, before anything heavy loads.

Like ``comlrl.launch``, this is part of a composition root and knows the algorithms' sections.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comlrl import trained as weights
from comlrl.config import Config, ConfigError
from comlrl.launch import Parser
from comlrl.settings import Loader, Setting, load_yaml, parse_override
from comlrl.trained import Trained
from trainers.configs import SECTIONS, sections_of, validate

BASELINES = ("single", "naive_concat", "sequential", "discussion")  # of comlrl.baselines


@dataclass(frozen=True)
class Plan:
    """What is to be evaluated, checked."""

    config: Config
    config_file: str
    teams: tuple[Trained, ...]  # several: cross-play
    baseline: str | None
    ks: tuple[int, ...]
    samples: int
    greedy: bool
    out: Path


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Everything that can be refused without loading a model. Raises ConfigError."""
    ks, samples = _samples(arguments)
    runs = arguments.cross_play or ()
    if runs and len(runs) < 2:
        raise ConfigError(f"--cross-play: '{runs[0]}' alone; give two runs or more")
    teams = [weights.locate(run, "--cross-play") for run in runs]
    if arguments.checkpoint:
        teams = [weights.locate(arguments.checkpoint)]
    file = arguments.config or (teams and teams[0].config_file)
    if not file:
        raise ConfigError(
            "--config: missing; give a YAML file, e.g. configs/magrpo_quickstart.yaml"
        )
    config = resolve(str(file), teams, arguments)
    if len(teams) > 1 and config.section.num_agents < 2:
        raise ConfigError("--cross-play: these runs have one agent each; give teams")
    if len(teams) > 1 and config.algorithm == "shppo":
        raise ConfigError("--cross-play: SHPPO's agents are one policy; give runs of another")
    return Plan(
        config,
        str(file),
        tuple(teams),
        arguments.baseline,
        ks,
        samples,
        arguments.greedy,
        Path(arguments.out) if arguments.out else _default_out(config, teams, arguments.baseline),
    )


def _samples(arguments: argparse.Namespace) -> tuple[tuple[int, ...], int]:
    try:
        ks = tuple(sorted({int(k) for k in arguments.k.split(",")}))
    except ValueError:
        ks = (0,)
    if ks[0] < 1:
        raise ConfigError(f"--k: {arguments.k!r}; give whole numbers from 1, e.g. 1,3,5,10")
    samples = arguments.samples or (1 if arguments.greedy else ks[-1])
    if samples < ks[-1]:
        raise ConfigError(f"--k: pass@{ks[-1]} needs {ks[-1]} samples for each task, not {samples}")
    if arguments.greedy and samples > 1:
        raise ConfigError(f"--samples: {samples} greedy answers would be the same; leave it out")
    return ks, samples


def _default_out(config: Config, teams: Sequence[Trained], baseline: str | None) -> Path:
    if len(teams) == 1 and teams[0].run_dir is not None:
        return teams[0].run_dir / "evaluation.json"
    what = "cross_play" if teams else baseline or "untrained"
    return Path(config.output.base_dir) / f"evaluation_{what}.json"


def resolve(file: str, teams: Sequence[Trained], arguments: argparse.Namespace) -> Config:
    """File, then what the weights say of themselves, then flags and overrides; checked."""
    algorithm = weights.run_algorithm(load_yaml(file), SECTIONS, file)
    loader = Loader(algorithm, sections_of(algorithm))
    loader.read(file)
    for team in teams:
        for setting in weights.settings(team, algorithm, SECTIONS, team.name):
            loader.set(setting)
    own_size = loader.build().section.num_agents
    if arguments.num_agents is not None:
        _check_size(arguments.num_agents, own_size, algorithm, teams)
        key = f"{algorithm}.num_agents"
        loader.set(Setting(key, arguments.num_agents, "--num-agents"))
    for item in arguments.override:
        loader.set(parse_override(item))
    config = loader.build()
    validate(config)
    for notice in loader.notices:
        print(f"notice: {notice}", file=sys.stderr)
    return config


def _check_size(size: int, own: int, algorithm: str, teams: Sequence[Trained]) -> None:
    trained_apart = any(team.model is None for team in teams) and algorithm != "shppo"
    if trained_apart and size != own:
        raise ConfigError(
            f"--num-agents: {size}, but these weights are of {own} agents; only a team trained by "
            "SHPPO acts with another number"
        )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Evaluate runs, models and baselines.", allow_abbrev=False)
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file; left out: that of the run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--checkpoint", metavar="RUN_OR_MODEL_DIR",
        help="a run, its final_model, one of its checkpoints, or a model; left out: untrained",
    )  # fmt: skip
    what.add_argument("--baseline", choices=BASELINES, help="a team without training")
    what.add_argument(
        "--cross-play", nargs="+", metavar="RUN", help="the helpers of each with the main of each"
    )
    add("--num-agents", type=int, metavar="M", help="size of the team (SHPPO: any)")
    add("--k", default="1", metavar="1,3,5,10", help="pass@k for these k")
    add("--samples", type=int, metavar="N", help="answers to each task; left out: the largest k")
    add("--greedy", action="store_true", help="the likeliest tokens instead of samples")
    add(
        "--override", nargs="*", action="extend", default=[], metavar="KEY=VALUE",
        help="dotted keys, e.g. dataset.eval_split=train magrpo.eval_num_samples=null",
    )  # fmt: skip
    add("--out", metavar="FILE", help="JSON file; Markdown and pictures are put beside it")
    return parser.parse_args(argv)
