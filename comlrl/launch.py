"""The composition that the train scripts share: command line → configuration → run → summary.

This module, like the scripts, may import every room. Heavy ones are imported inside functions,
so that ``--help`` and a mistake in a configuration are answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from comlrl import initial
from comlrl.assemble import (
    Run,
    Trainer,
    assemble,
    build_reward,
    build_rollout,
    check_devices,
    deterministic,
    load_both_splits,
)
from comlrl.config import Config, ConfigError
from comlrl.run_dir import check_free
from comlrl.settings import Loader, Setting, load_yaml, parse_override, parse_value
from comlrl.signals import Interrupted, Signals
from trainers.configs import (
    SECTIONS,
    sections_of,
    share_common_keys,
    shift_notice,
    truncation_notice,
    validate,
)
from trainers.effects import without_effect

if TYPE_CHECKING:
    from comlrl.resume import Start
    from comlrl.types import Logger

__all__ = ["Run", "Trainer", "build_reward", "build_rollout", "is_user_error", "main"]

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
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
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
MODEL_NICKNAMES = {"qwen": "Qwen/Qwen2.5-Coder-1.5B"}


def main(algorithm: str, build: Callable[[Run], Trainer], argv: Sequence[str] | None = None) -> int:
    """Run a train script; returns its exit code."""
    with Signals() as signals:
        try:
            return _main(algorithm, build, argv, signals)
        except Interrupted as interrupted:
            if os.environ.get("RANK", "0") == "0":
                print(f"interrupted: {interrupted}", file=sys.stderr)
            return interrupted.code


def _main(
    algorithm: str,
    build: Callable[[Run], Trainer],
    argv: Sequence[str] | None,
    signals: Signals,
) -> int:
    try:
        arguments = parse_arguments(algorithm, argv)
        config, notices = resolve(algorithm, arguments)
    except ConfigError as error:
        return _refuse(error)
    if os.environ.get("RANK", "0") == "0":
        try:
            check_free(config, arguments.resume)
            initial.check_models(config)
            if config.init_from is not None and not arguments.resume:
                notices += initial.check(config, SECTIONS)
        except ConfigError as error:
            return _refuse(error)
        for notice in notices + no_weights_notice(config):
            print(f"notice: {notice}", file=sys.stderr)
    if arguments.dry_run:
        return _dry_run(config)
    return execute(config, build, signals, arguments.resume, arguments.resume_force)


def no_weights_notice(config: Config) -> list[str]:
    """Where a run will leave nothing that could be evaluated or gone on with."""
    output = config.output
    if config.keeps_final_model or output.save_best or config.section.save_steps:
        return []
    why = "output.save_final_model=false"
    if output.save_final_model == "auto":
        why = "output.save_final_model=auto keeps adapters, and lora.enabled=false has none"
    return [f"this run leaves no weights: {why}; set output.save_final_model=true to keep them"]


def _dry_run(config: Config) -> int:
    """Check what is at hand, then tell the cost and what was left unchecked."""
    from comlrl.at_hand import check
    from comlrl.dry_run import describe

    try:
        unchecked = check(config)
        print(describe(config))
    except ValueError as error:
        if not is_user_error(error):
            raise
        return _refuse(error)
    for line in unchecked:
        print(f"not checked: {line}")
    return 0


def is_user_error(error: BaseException) -> bool:
    """Mistakes of the user's come as ConfigError, or as errors that rooms name so."""
    return isinstance(error, ConfigError) or getattr(error, "user_error", False)


def _refuse(error: Exception, code: int = 2) -> int:
    """Print an error that the user can mend, once for all processes; returns ``code``."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        print(f"error: {error}", file=sys.stderr)
        return code
    from comlrl import distributed

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, as soon as the first has left
    distributed.start()
    if distributed.give_up(str(error), code):
        print(f"error: {error}", file=sys.stderr, flush=True)
    distributed.stop()
    return code


class Parser(argparse.ArgumentParser):
    """Mistakes on the command line are told like those in a file: one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; see --help")


def parse_arguments(algorithm: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    default = DEFAULT_CONFIGS.get(algorithm)
    parser = Parser(
        description=f"Train with {algorithm.upper()}.",
        epilog="Keys: docs/configuration.md. The last of file, older flags and --override wins.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        default=default,
        required=default is None,
        metavar="FILE",
        help=f"YAML file, e.g. configs/{algorithm}_quickstart.yaml"
        + (f"; left out: configs/{default.name}" if default else ""),
    )
    parser.add_argument(
        "--override", nargs="*", action="extend", default=[], metavar="KEY=VALUE",
        help=f"dotted keys, e.g. {algorithm}.learning_rate=1e-4 seed=7",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument(
        "--resume-force", action="store_true", help="… even where the configuration has changed"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check all that is at hand, print the cost, load no weights",
    )
    older = parser.add_argument_group("older flags, each a key of the configuration")
    for flag, key in FLAGS.items():
        count = "+" if flag == "turn_gradient_weights" else None
        shown = key.replace("<algo>", algorithm)
        older.add_argument(f"--{flag}", nargs=count, metavar="VALUE", help=shown)
    return parser.parse_args(argv)


def resolve(algorithm: str, arguments: argparse.Namespace) -> tuple[Config, list[str]]:
    """File, then older flags, then overrides; checked. Raises ConfigError."""
    sections = sections_of(algorithm)
    loader = Loader(algorithm, sections)
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
        if flag == "num_steps":  # environment steps alone end the run
            for other in ("num_train_epochs", "max_steps"):
                loader.set(Setting(f"{algorithm}.{other}", None, f"--{flag}"))
    for item in arguments.override:
        loader.set(parse_override(item))
    config = share_common_keys(loader.build(), loader.given)
    validate(config)
    notices = loader.notices + truncation_notice(config) + shift_notice(config)
    return config, notices + without_effect(config, loader.given)


def _check_algorithm(algorithm: str, sections: Mapping[str, type], file: str) -> None:
    """Raises ConfigError for a file that was written for another script."""
    others = [name for name in load_yaml(file) if name in SECTIONS and name not in sections]
    if others:
        raise ConfigError(
            f"--config: {str(file)!r} has a section `{others[0]}`; run train_{others[0]}.py, or "
            f"give a file for {algorithm}"
        )


def execute(
    config: Config,
    build: Callable[[Run], Trainer],
    signals: Signals,
    resume: bool = False,
    force: bool = False,
) -> int:
    """Build everything, train, and leave the run directory; returns the exit code."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from comlrl import distributed
    from comlrl.checkpoint import CheckpointError
    from comlrl.resume import prepare

    distributed.start(config.distributed.strategy)
    with contextlib.ExitStack() as opened:
        opened.callback(distributed.stop)
        try:
            start = distributed.from_main(lambda: prepare(config, resume, force))
            run, trainer = _open(start, build, signals, force, opened)
            distributed.everyone("open")  # whoever could not open says so here
        except ValueError as error:
            if not is_user_error(error):
                raise
            return _refuse(error)
        except distributed.PeerFailed as failed:
            return failed.code
        try:
            trainer.train()
            _finish(run)
        except CheckpointError as error:
            return _refuse(error, 1)
        except distributed.PeerFailed as failed:
            return failed.code
        except Interrupted as interrupted:
            if interrupted.path is not None:
                distributed.everyone("interrupted")  # nobody leaves while the main one saves
                opened.close()  # the loggers: what they hold belongs into the report
                _report_interrupted(run.run_dir)
            raise
        except (ValueError, RuntimeError, OSError) as error:
            return _stopped(error)
    if distributed.is_main():
        from loggers.model_card import write_model_card
        from loggers.report import write_report

        if config.keeps_final_model or config.output.save_best:
            write_model_card(run.run_dir)
        write_report(run.run_dir)
        for notice in no_weights_notice(config):
            print(f"notice: {notice}", file=sys.stderr)
        print(f"done: {run.run_dir}/report.html")
    return 0


def _report_interrupted(run_dir: Path) -> None:
    """The report of what was done so far; the checkpoint, which is safe, matters more."""
    from comlrl import distributed
    from loggers.report import write_report
    from loggers.run_data import ReportError

    if not distributed.is_main():
        return
    try:
        write_report(run_dir)
        print(f"report: {run_dir}/report.html")
    except (OSError, ReportError) as error:
        print(f"error: no report: {error}", file=sys.stderr)


def _stopped(error: Exception) -> int:
    """An error in the middle of a run; raised again where it is not the user's or the disk's."""
    from comlrl.types import NonFiniteError

    if is_user_error(error):
        code = getattr(error, "exit_code", 2)
    elif isinstance(error, NonFiniteError) or getattr(error, "errno", None) in DISK_ERRORS:
        code = 1
    else:
        raise error
    print(f"error: {error}", file=sys.stderr)
    return code


def _open(
    start: Start,
    build: Callable[[Run], Trainer],
    signals: Signals,
    force: bool,
    opened: contextlib.ExitStack,
) -> tuple[Run, Trainer]:
    """The assembled run and its trainer, resumed where it is to be; ``opened`` closes it all."""
    from comlrl import checkpoint, distributed, sharding
    from comlrl.resume import write_config

    distributed.check_cards()
    check_devices(start.config)
    sharding.check(start.config)
    deterministic()
    found = None if start.checkpoint is None else checkpoint.read(start.checkpoint)
    tasks = distributed.from_main(lambda: load_both_splits(start.config))
    run = assemble(start, signals, *tasks)
    opened.callback(run.reward.close)
    trainer = build(run)
    if found is not None:
        run.loop.resume(found, trainer, force=force)  # type: ignore[arg-type]
    if distributed.is_main():
        write_config(start)
        _attach_loggers(run, resume=found is not None)
        opened.callback(_closing(run.loop.logger))
    return run, trainer


def _closing(logger: Logger) -> Callable[[], None]:
    def close() -> None:
        try:
            logger.close()
        except OSError as error:  # a full disk: the error that ended the run is the one to tell
            print(f"error: {error}", file=sys.stderr)

    return close


def _attach_loggers(run: Run, resume: bool) -> None:
    """Main process: what was logged behind the checkpoint goes, the W&B run stays the same."""
    import loggers
    from comlrl.resume import keep_lines

    counters, identity = run.loop.counters, run.run_dir / "wandb.json"
    if resume:
        keep_lines(run.run_dir / "metrics.jsonl", counters.logged)
        if "wandb" in counters.extra and not identity.exists():
            identity.write_text(counters.extra["wandb"])
    logger = loggers.build(run.config, run.run_dir, run.loop.progress, resume=resume)
    if resume:
        logger.truncate_after(counters.updates, counters.env_steps)
    if identity.exists():
        counters.extra["wandb"] = identity.read_text()
    run.loop.logger = logger


def _finish(run: Run) -> None:
    """Final model and summary."""
    from comlrl import distributed
    from comlrl.summary import write_summary

    run.loop.progress.begin("saving the result")
    final, networks = run.run_dir / "final_model", getattr(run.rollout.sampler, "policy", None)
    if run.config.keeps_final_model:
        run.save(final)
    elif networks and run.config.output.save_final_model == "auto" and distributed.is_main():
        networks.save(final)  # SHPPO's are small
    write_summary(run)
