"""Builds a checked configuration from the command line, before anything heavy loads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from comlrl.config.algorithms import SECTIONS, sections_of
from comlrl.config.loader import Loader
from comlrl.config.resolved import Config
from comlrl.config.yaml_values import Setting, load_yaml, parse_override, parse_value
from comlrl.errors import UserError
from comlrl.quoting import one_line
from comlrl.trainers.launch.checks.shipped import CONFIGS, config_file
from comlrl.trainers.launch.checks.validation import notices, validate
from comlrl.trainers.launch.wiring.resolved_work import Work

DEFAULT_CONFIGS = {name: CONFIGS / f"{name}_he_config.yaml" for name in ("ppo", "shppo")}

# Legacy flag → key; "<algo>" is the algorithm's section.
FLAGS = {
    "model_name": "agent_model.name",
    "base_model": "agent_model.name",
    "output_base_dir": "output.base_dir",
    "save_dir": "output.dir",
    "num_epochs": "<algo>.num_train_epochs",
    "lora_rank": "lora.r",
    "num_steps": "<algo>.max_env_steps",
    "num_turns": "<algo>.num_turns",
    "num_agents": "<algo>.num_agents",
    "turn_gradient_weights": "<algo>.turn_gradient_weights",
    "learning_rate": "<algo>.learning_rate",
}
MODEL_NICKNAMES = {"qwen": "Qwen/Qwen2.5-Coder-1.5B"}


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line and accepts ``--a.b=value``, the form of W&B sweeps,
    as ``--override a.b=value``. ``command``: the subcommand's name, if the process was started as
    ``comlrl``."""

    def __init__(self, command: str, **options: Any) -> None:
        script = Path(sys.argv[0]).name
        started_as_script = script.endswith(".py") and script != "__main__.py"
        program = script if started_as_script else f"comlrl {command}"
        super().__init__(prog=program, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = super().parse_known_args(args, namespace)
        settings = [item for item in rest if hasattr(options, "override") and "=" in item]
        if settings:
            options.override = [*options.override, *settings]
        return options, [item for item in rest if item not in settings]

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see --help")


def print_written(path: Path | str) -> None:
    """Print the path of a command's result, escaped for the terminal."""
    print(f"written: {one_line(str(path), 4096)}")


def parse_arguments(algorithm: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    default = DEFAULT_CONFIGS.get(algorithm)
    parser = Parser(
        f"train {algorithm}",
        description=f"Train with {algorithm.upper()}.",
        epilog="Keys and older flags: docs/configuration.md. The last of file, older flags and "
        "--override wins.",
    )
    parser.add_argument(
        "--config",
        default=default,
        required=default is None,
        metavar="FILE",
        help=f"YAML file, or a shipped one by name, e.g. {algorithm}_quickstart"
        + (f"; left out: {default.stem}" if default else ""),
    )
    parser.add_argument(
        "--override", nargs="*", action="extend", default=[], metavar="KEY=VALUE",
        help=f"dotted keys, e.g. {algorithm}.learning_rate=1e-4 seed=7",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument(
        "--resume-force", action="store_true",
        help="continue even if the configuration, the tasks or your modules have changed",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything available locally and print the cost, without loading weights",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="with --dry-run: also time two training steps on this machine, and extrapolate to the "
        "run",
    )
    parser.add_argument(
        "--check-solutions",
        action="store_true",
        help="with --dry-run: score the solutions that the rows contain, and list the rows whose "
        "solution fails",
    )
    parser.add_argument("--hardware", nargs="?", const="", help=argparse.SUPPRESS)
    for flag in FLAGS:  # they still work, but would fill half of --help
        count = "+" if flag == "turn_gradient_weights" else None
        parser.add_argument(f"--{flag}", nargs=count, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.hardware is not None:
        raise UserError(
            f"--hardware: '{arguments.hardware}' is no longer estimated for; use --dry-run "
            "--measure on the machine itself"
        )
    if arguments.measure and not arguments.dry_run:
        raise UserError("--measure: works only with --dry-run; add it")
    if arguments.check_solutions and not arguments.dry_run:
        raise UserError("--check-solutions: works only with --dry-run; add it")
    arguments.config = config_file(arguments.config)
    return arguments


def resolve(algorithm: str, arguments: argparse.Namespace) -> tuple[Config, Work, list[str]]:
    """Read the file, then older flags, then overrides, and check them. Return the configuration,
    the run's work, and notices.

    Raises UserError.
    """
    sections = sections_of(algorithm)
    loader = Loader(algorithm, sections)
    if arguments.config is not None:  # optional in the Python API
        _check_algorithm(algorithm, sections, arguments.config)
        loader.read(arguments.config)
    for flag, key in FLAGS.items():
        text = getattr(arguments, flag)
        if text is None:
            continue
        value = [parse_value(t) for t in text] if isinstance(text, list) else parse_value(text)
        if flag in ("model_name", "base_model"):
            value = MODEL_NICKNAMES.get(text, text)
        loader.set(Setting(key.replace("<algo>", algorithm), value, f"--{flag}"))
        if flag == "num_steps":  # only environment steps end the run
            for other in ("num_train_epochs", "max_steps"):
                loader.set(Setting(f"{algorithm}.{other}", None, f"--{flag}"))
    for item in arguments.override:
        loader.set(item if isinstance(item, Setting) else parse_override(item))
    config = loader.build()
    work = validate(config)
    config = config.with_roles(work.roles)
    return config, work, loader.notices + notices(config, work, loader.sources)


def _check_algorithm(algorithm: str, sections: Mapping[str, type], file: str) -> None:
    """Raise UserError for a file that was written for another script."""
    others = [name for name in load_yaml(file) if name in SECTIONS and name not in sections]
    if others:
        raise UserError(
            f"--config: {str(file)!r} contains a section `{others[0]}`; use train_{others[0]}.py "
            f"(`comlrl train {others[0]}`), or a file for {algorithm}"
        )
