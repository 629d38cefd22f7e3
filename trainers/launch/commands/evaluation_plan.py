"""Builds a checked plan from the command line of ``evaluate.py``, before anything heavy loads."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comlrl.config.algorithms import sections_of
from comlrl.config.plugins.modules import digests, stored_digests
from comlrl.config.resolved import Config
from comlrl.config.yaml_values import Setting, parse_override
from comlrl.errors import UserError, notice
from comlrl.loop.run_directory import make_writable
from comlrl.trainers.launch.checks.shipped import config_file
from comlrl.trainers.launch.checks.validation import validate
from comlrl.trainers.launch.commands.command_line import Parser
from comlrl.trainers.launch.wiring import init_from, own_algorithm, replacements, weights
from comlrl.trainers.launch.wiring.replacements import Other
from comlrl.trainers.launch.wiring.resolved_work import Work, check_baseline
from comlrl.trainers.launch.wiring.weights import Trained

LIKE_MODELS = ("agents", "agent_model.name", "lora.enabled", "lora.r")  # equal in teams that mix
MOST_SAMPLES = 10_000  # answers to each task
# Implemented in comlrl.evaluation.baselines.
BASELINES = ("single", "naive_concat", "sequential", "discussion")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked evaluation: its configuration, teams and settings."""

    config: Config
    work: Work
    config_file: str
    teams: tuple[Trained, ...]  # more than one: cross-play
    baseline: str | None
    ks: tuple[int, ...]
    samples: int
    greedy: bool
    out: Path | None  # None: named by ``place``
    export_samples: Path | None = None
    episodes: Path | None = None
    replaced: Mapping[int, Other] = field(default_factory=dict)  # agent → its replacement


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Check everything that can be checked without loading a model. Raises UserError."""
    for option in ("config", "checkpoint", "out", "export_samples", "episodes"):
        if getattr(arguments, option) == "":  # e.g. of an unset shell variable
            name = option.replace("_", "-")
            raise UserError(f"--{name}: ''; name a file or folder, or leave it out")
    ks, samples = _samples(arguments)
    runs = arguments.cross_play or ()
    if runs and len(runs) < 2:
        raise UserError(f"--cross-play: '{runs[0]}' alone; name two runs or more")
    teams = [weights.locate(run, "--cross-play") for run in runs]
    if arguments.checkpoint is not None:
        teams = [weights.locate(arguments.checkpoint)]
    file = teams[0].config_file if teams else None
    if arguments.config is not None:
        file = config_file(arguments.config)
    if not file:
        raise UserError(
            "--config: missing; name a YAML file, or a shipped one, e.g. magrpo_quickstart"
        )
    for option, text in (
        ("--export-samples", arguments.export_samples),
        ("--episodes", arguments.episodes),
    ):
        if text and (runs or arguments.replace):
            raise UserError(
                f"{option}: works for one team without --replace; evaluate teams one by one"
            )
    pairs = replacements.parse(arguments.replace, teams)
    others = [who for _, who in pairs if isinstance(who, Trained)]
    config, work = resolve(str(file), [*teams, *others], arguments)
    replaced = replacements.check(pairs, config.section, config.team, work.roles)
    if arguments.baseline:
        num_agents = config.section.num_agents
        check_baseline(arguments.baseline, num_agents, config.role_sampling, work.domain)
    init_from.check_models(config.named_models, config.beside)
    if config.init_from is not None and (not teams or "untrained" in replaced.values()):
        init_from.check(config)
    if len(teams) > 1 and (config.section.num_agents < 2 or config.section.one_policy):
        raise UserError(
            "--cross-play: the agents of these runs act by one policy, or there is only one; use "
            "teams of several agents"
        )
    out = None if arguments.out is None else Path(arguments.out)
    exported = None if arguments.export_samples is None else Path(arguments.export_samples)
    episodes = None if arguments.episodes is None else Path(arguments.episodes)
    _check_files({"--out": out, "--export-samples": exported, "--episodes": episodes})
    if exported and (config.program.replaces_turns or config.reward.target is not None):
        raise UserError(
            "--export-samples: exports programs that the code domain's reward runs, and this run "
            "has its own program or reward; leave it out"
        )
    return Plan(
        config=config,
        work=work,
        config_file=str(file),
        teams=tuple(teams),
        baseline=arguments.baseline,
        ks=ks,
        samples=samples,
        greedy=arguments.greedy,
        out=out,
        export_samples=exported,
        episodes=episodes,
        replaced=replaced,
    )


def _samples(arguments: argparse.Namespace) -> tuple[tuple[int, ...], int]:
    try:
        ks = tuple(sorted({int(k) for k in arguments.k.split(",")}))
    except ValueError:
        ks = (0,)
    if ks[0] < 1 or ks[-1] > MOST_SAMPLES:
        raise UserError(
            f"--k: {arguments.k!r}; use whole numbers from 1 to {MOST_SAMPLES:,}, e.g. 1,3,5,10"
        )
    samples = arguments.samples
    if samples is None:
        samples = 1 if arguments.greedy else ks[-1]
    if not 1 <= samples <= MOST_SAMPLES:
        raise UserError(f"--samples: {samples}; use a whole number from 1 to {MOST_SAMPLES:,}")
    if samples < ks[-1]:
        raise UserError(f"--k: pass@{ks[-1]} needs {ks[-1]} samples for each task, not {samples}")
    if arguments.greedy and samples > 1:
        raise UserError(f"--samples: {samples} greedy answers would be the same; leave it out")
    return ks, samples


def _check_files(file_by_option: Mapping[str, Path | None]) -> None:
    """Raise UserError for files that cannot be written, or that would replace each other."""
    files = {option: file for option, file in file_by_option.items() if file is not None}
    written: dict[Path, str] = {}  # resolved path → its option
    for option, file in files.items():
        if file.is_dir():
            raise UserError(f"{option}: '{file}' is a folder; name a file in it")
        if option == "--out" and file.suffix.lower() in (".md", ".png"):
            raise UserError(f"--out: '{file}' names the JSON file; use a name that ends in .json")
        if (path := file.resolve()) in written:
            raise UserError(f"{option}: '{file}' is a file of {written[path]}; use another name")
        written[path] = option
        if option == "--out":
            written[file.with_suffix(".md").resolve()] = option
    for option, file in files.items():
        make_writable(file.parent, option)


def place(plan: Plan, described: Mapping[str, Any]) -> Path:
    """Return the path of an evaluation's file: ``--out``, or else a descriptive name that ends with
    a digest of ``described``, beside the run if there is one. Repeating an evaluation thus replaces
    its file, and no other evaluation does.

    ``described``: the file's fields that describe the evaluation.
    """
    if plan.out is not None:
        return plan.out
    data, run_dir = plan.config.dataset, None
    if len(plan.teams) > 1:
        names = [_label(team) for team in plan.teams]
        more = f"_and_{len(names) - 3}_more" if len(names) > 3 else ""
        what = f"cross_play_{'_x_'.join(names[:3])}{more}"
    elif plan.teams:
        run_dir = plan.teams[0].run_dir
        what = plan.teams[0].weights if run_dir is not None else _label(plan.teams[0])
        for agent, who in plan.replaced.items():
            what += f"_{agent}-{_label(who) if isinstance(who, Trained) else who}"
    else:
        models = dict.fromkeys(plan.config.agent_models)
        named = "_".join(Path(name.replace(":", "/")).name for name in models)
        what = f"{plan.baseline or 'untrained'}_{named}"
    greedy = "_greedy" if plan.greedy else ""
    name = re.sub(
        r"[^\w.-]+", "-", f"evaluation_{what}_{data.short_name}_{data.eval_split}{greedy}"
    )
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:6]
    folder = run_dir or Path(plan.config.output.base_dir)
    return folder / f"{name.strip('-')}_{digest}.json"


def _label(team: Trained) -> str:
    return (team.run_dir or Path(team.name)).resolve().name


def resolve(
    file: str, teams: Sequence[Trained], arguments: argparse.Namespace
) -> tuple[Config, Work]:
    """Read the file, then the settings stored with the weights, then flags and overrides, and check
    them."""
    algorithms = own_algorithm.all_sections(Path(file).parent, *(team.run_dir for team in teams))
    loader = weights.read_config(Path(file), algorithms)
    algorithm = loader.algorithm
    team_settings = [weights.settings(team, algorithm, algorithms, team.name) for team in teams]
    overrides = [
        item if isinstance(item, Setting) else parse_override(item) for item in arguments.override
    ]
    option = "--replace" if arguments.replace else "--cross-play"
    _check_alike(option, teams, team_settings, algorithm, [s.key for s in overrides])
    from_file = loader.build()
    for setting in itertools.chain(*team_settings):
        loader.set(setting)
    if teams and teams[0].run_dir:
        loader.folder = teams[0].run_dir.absolute()
    for section in sections_of(algorithm, algorithms):  # the file's is that of training
        loader.set(Setting(f"{section}.eval_num_samples", None, "evaluate.py"))
    trained_size = loader.build().section.num_agents
    if arguments.num_agents is not None:
        key = f"{algorithm}.num_agents"
        loader.set(Setting(key, arguments.num_agents, "--num-agents"))
    for setting in overrides:
        loader.set(setting)
    config = loader.build()
    size, separate = config.section.num_agents, not config.section.one_policy
    if separate and size != trained_size and any(team.model is None for team in teams):
        raise UserError(
            f"num_agents: {size}, but these weights are of {trained_size} agents; only a team of "
            "one policy (SHPPO, ppo.shared_policy) acts with another number"
        )
    work = validate(config)
    config = config.with_roles(work.roles)
    for text in loader.notices:
        notice(text)
    used = digests(work.sources)
    for team in teams:
        for name, digest in sorted(stored_digests(team.run_dir).items() if team.run_dir else ()):
            if used.get(name, digest) != digest:
                notice(f"{name} is no longer what '{team.name}' was trained with")
    for setting in team_settings[0] if teams else ():
        if setting.key in weights.WORK:
            value_of, trained = operator.attrgetter(setting.key), f"{setting.key}={setting.value!r}"
            if (value := value_of(config)) != setting.value:
                notice(f"{setting.key}={value!r}, and '{teams[0].name}' was trained with {trained}")
            elif (other := value_of(from_file)) != value:
                notice(
                    f"{trained} is used, as '{teams[0].name}' was trained with it; {file} sets "
                    f"{other!r}"
                )
    return config, work


def _check_alike(
    option: str,
    teams: Sequence[Trained],
    team_settings: Sequence[Sequence[Setting]],
    algorithm: str,
    overridden: Sequence[str],
) -> None:
    """Raise UserError for teams whose agents cannot replace each other, and for teams that were
    trained on different work or in another turn order, unless an override selects one."""
    order, facts = f"{algorithm}.turn_order", []
    for team, settings in zip(teams, team_settings, strict=True):
        if len(teams) > 1 and team.model is not None:
            raise UserError(f"{option}: '{team.name}' is a model, not a team; name runs")
        compared = (*weights.WORK, *LIKE_MODELS, f"{algorithm}.num_agents")
        held = {s.key: s.value for s in settings if s.key in compared}
        if isinstance(held.get("agents"), dict):  # of the weights, only what they fit
            names = ("model", "lora", "api")
            entries = [[agent.get(name) for name in names] for agent in held["agents"].values()]
            held["agents"] = entries if any(map(any, entries)) else None
        if team.run_dir is not None:
            held |= {name: digest[:8] for name, digest in stored_digests(team.run_dir).items()}
            if not any(key.endswith("turn_order") for key in overridden):
                held[order] = weights.load_run(team.run_dir).section.turn_order
        facts.append(held)
    for team, held in zip(teams, facts, strict=True):
        for key in held:
            if key not in facts[0] or held[key] == facts[0][key]:
                continue
            fix = "use runs that agree in this"
            if key in (order, *weights.WORK):
                if any(text.startswith(key) for text in overridden):
                    continue
                fix += f", or set it for all of them with --override {key}=…"
            raise UserError(
                f"{option}: '{team.name}' was trained with {key}={held[key]!r}, and "
                f"'{teams[0].name}' with {facts[0][key]!r}; {fix}"
            )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("evaluate", description="Evaluate runs, models and baselines.")
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file, or a shipped one by name; default: the run's")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--checkpoint", metavar="RUN_OR_MODEL_DIR",
        help="a run, its final_model, one of its checkpoints, or a model; default: untrained",
    )  # fmt: skip
    what.add_argument("--baseline", choices=BASELINES, help="a team without training")
    what.add_argument(
        "--cross-play", nargs="+", metavar="RUN",
        help="join the last agent of each run with the other agents of each run",
    )  # fmt: skip
    add(
        "--replace", nargs="+", default=[], metavar="AGENT=WHO",
        help="agents of --checkpoint by role or number, and who acts in the place of each: "
        "0=untrained, 0=silent, 0=1 (or a role), 0=RUN; all=WHO for every agent",
    )  # fmt: skip
    add(
        "--num-agents",
        type=int,
        metavar="M",
        help="number of agents of an untrained team, or of a run with one policy",
    )
    add("--k", default="1", metavar="1,3,5,10", help="pass@k for these k")
    add("--samples", type=int, metavar="N", help="answers to each task; default: the largest k")
    add("--greedy", action="store_true", help="take the likeliest tokens instead of sampling")
    add(
        "--override", nargs="*", action="extend", default=[], metavar="KEY=VALUE",
        help="dotted keys, e.g. dataset.eval_split=train magrpo.eval_num_samples=16",
    )  # fmt: skip
    add("--export-samples", metavar="FILE", help="write the answers as JSONL that EvalPlus reads")
    add("--episodes", metavar="FILE", help="write prompts, answers and rewards as JSONL")
    add("--out", metavar="FILE", help="JSON file; default: a name made of what was evaluated")
    return parser.parse_args(argv)
