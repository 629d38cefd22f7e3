"""The composition that the train scripts share: command line → configuration → run → summary.

Heavy rooms are imported inside functions, so that ``--help`` and a mistake in a configuration are
answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl import files
from comlrl.config.algorithms import CommonConfig
from comlrl.config.resolved import Config
from comlrl.errors import (
    NonFiniteError,
    ServerError,
    UserError,
    in_one_line,
    notice,
    print_error,
    report,
)
from comlrl.files import tolerant_terminal
from comlrl.loop.interrupts import Interrupted, Signals
from comlrl.loop.parts import Trainer
from comlrl.loop.run_directory import check_free
from comlrl.quoting import one_line, printable
from comlrl.run_files import FINAL_MODEL, REPORT
from comlrl.trainers.launch.checks.installed import check_installed
from comlrl.trainers.launch.checks.shipped import LAUNCH
from comlrl.trainers.launch.commands.command_line import parse_arguments, resolve
from comlrl.trainers.launch.wiring import allocator, hub, init_from, own_algorithm, vllm
from comlrl.trainers.launch.wiring.assembly import Run, assemble, heterogeneous_policy
from comlrl.trainers.launch.wiring.machine import check_devices, deterministic
from comlrl.trainers.launch.wiring.resolved_work import Work
from comlrl.trainers.launch.wiring.sampling_settings import limits
from comlrl.trainers.launch.wiring.task_splits import load_both_splits

if TYPE_CHECKING:
    from comlrl.loop.loop import Loop
    from comlrl.loop.records import Logger
    from comlrl.loop.resume import Start
    from comlrl.types import Reward

Build = Callable[[Run[Any]], Trainer]  # of a train script, which knows its own section's class


def main(
    algorithm: str,
    build: Build,
    argv: Sequence[str] | None = None,
    section: type | None = None,
) -> int:
    """Run a train script and return its exit code. ``section``: the class of the keys of an
    algorithm that does not ship."""
    tolerant_terminal()
    if section is not None:
        own_algorithm.add(algorithm, section)
    with Signals() as signals:
        try:
            return _main(algorithm, build, argv, signals)
        except Interrupted as interrupted:
            if os.environ.get("RANK", "0") == "0":
                print(f"interrupted: {interrupted}", file=sys.stderr)
            return interrupted.code


def _main(
    algorithm: str,
    build: Build,
    argv: Sequence[str] | None,
    signals: Signals,
) -> int:
    try:
        arguments = parse_arguments(algorithm, argv)
        config, work, notices = resolve(algorithm, arguments)
    except UserError as error:
        return _refuse(error)
    first = os.environ.get("RANK", "0") == "0"
    only_checks = arguments.dry_run and not arguments.measure
    if only_checks and not first:
        return 0  # one process checks and prints for all
    if first:
        try:
            notices += check(config, arguments.resume)
        except UserError as error:
            return report(error) if only_checks else _refuse(error)
        for text in notices + no_weights_notice(config):
            notice(text)
    if arguments.dry_run and first:
        try:
            _dry_run(config, work, arguments.check_solutions)
        except UserError as error:
            return report(error) if only_checks else _refuse(error)
    if only_checks:
        return 0
    try:
        hub.check_reachable(config, hub.named_models(config))
    except UserError as error:
        return _refuse(error)
    if arguments.measure:
        return _measure(algorithm, arguments, config, build, signals)
    return execute(config, work, build, signals, arguments.resume, arguments.resume_force)


def check(config: Config, resume: bool) -> list[str]:
    """Return notices. Raise UserError for what this machine or the run's folder does not have."""
    check_installed(config)
    check_free(config, resume)
    hub.check_data(config)
    init_from.check_models(config)
    init_from.check_target_modules(config)
    if config.init_from is None or resume:
        return []
    return init_from.check(config)


def no_weights_notice(config: Config) -> list[str]:
    """Return a notice where a run will leave nothing that could be evaluated or trained further."""
    output, section = config.output, config.section
    saves = section.eval_interval if section.save_steps is None else section.save_steps
    if config.keeps_final_model or output.save_best or saves:
        return []
    why = "output.save_final_model=false"
    if output.save_final_model == "auto":
        why = "output.save_final_model=auto keeps adapters, and lora.enabled=false has none"
    return [f"this run leaves no weights: {why}; set output.save_final_model=true to keep them"]


def _dry_run(config: Config, work: Work, solutions: bool) -> None:
    """Check what is available, then print the cost, how many of the rows' solutions pass, and
    what was left unchecked. Raise UserError."""
    from comlrl.trainers.launch.checks.at_hand import check
    from comlrl.trainers.launch.checks.solutions import check_solutions
    from comlrl.trainers.launch.cost.dry_run import describe

    unchecked, tasks, forms = check(config, work)
    lines = [describe(config, limits(config, work.roles)), *forms]
    lines += check_solutions(tasks, work, config.section.num_agents, score=solutions)
    print(printable("\n".join(lines)))
    for line in unchecked:
        print(printable(f"not checked: {line}"))


def _measure(
    algorithm: str,
    arguments: argparse.Namespace,
    config: Config,
    build: Build,
    signals: Signals,
) -> int:
    """Train for some steps in a temporary folder, print the estimated cost of the run, and
    return the exit code."""
    from comlrl.trainers.launch.cost.measured import describe_measured, overrides

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        arguments.override += overrides(config, run_dir)
        measured, work, _ = resolve(algorithm, arguments)
        code = execute(measured, work, build, signals, pages=False)
        if code == 0 and os.environ.get("RANK", "0") == "0":
            train, _ = load_both_splits(config, work.domain)
            try:
                print(describe_measured(config, measured, run_dir, len(train)))
            except UserError as error:
                return report(error)
    return code


def _refuse(error: Exception) -> int:
    """Print an error of the user's or the disk's, once for all processes, and return its exit
    code. Raise any other again."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return report(error)
    from comlrl.processes import distributed

    if distributed.lost_peer(error):
        return _left_alone()
    known = in_one_line(error)
    if known is None:
        raise error
    text, code = known
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, as soon as the first has left
    distributed.start()
    if distributed.give_up(text, code):
        report(error)
    distributed.stop()
    return code


def execute(
    config: Config,
    work: Work,
    build: Build,
    signals: Signals,
    resume: bool = False,
    force: bool = False,
    pages: bool = True,
    raises: bool = False,
) -> int:
    """Build everything, train, and leave the run directory; return the exit code.

    ``pages``: write the report and the model card. ``raises``: raise what the user has to fix as
    UserError, in place of printing it.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from comlrl.loop.checkpoint import CheckpointError
    from comlrl.processes import distributed

    distributed.start()
    with contextlib.ExitStack() as opened:
        opened.callback(distributed.stop)
        try:
            start = distributed.from_main(lambda: _start(config, work, resume, force, opened))
            if distributed.is_main() and start.before is not None:
                opened.callback(start.before.restore)  # once the loggers are closed
            run, trainer = _open(start, work, build, signals, force, opened)
            distributed.all_gather("open")  # whoever could not open says so here
        except distributed.PeerFailed as failed:
            return failed.code
        except Exception as error:
            if raises:
                raise
            return _refuse(error)
        allocator.keep_loaded()
        try:
            trainer.train()
            _finish(run)
        except CheckpointError as error:
            if raises:
                raise
            return _refuse(error)
        except ServerError as error:
            if distributed.give_up(str(error), error.exit_code, saves=True) and not raises:
                report(error)
            _leave(run.loop)
            if raises:
                raise
            return error.exit_code
        except distributed.PeerFailed as failed:
            if failed.saves:
                _leave(run.loop)
            return failed.code
        except Interrupted as interrupted:
            if interrupted.path is not None:
                distributed.all_gather("interrupted")  # nobody leaves while the main one saves
                opened.close()  # the loggers: what they hold belongs into the report
                if distributed.is_main() and _write_pages(config, run.run_dir):
                    print(printable(f"report: {run.run_dir / REPORT}"))
            raise
        except Exception as error:
            return _stopped(error, run.loop, raises)
    if distributed.is_main() and pages:
        weights = config.keeps_final_model or config.output.save_best
        written = _write_pages(config, run.run_dir, card=weights)
        for text in no_weights_notice(config):
            notice(text)
        print(printable(f"done: {run.run_dir / REPORT if written else run.run_dir}"))
    return 0


def _start(
    config: Config, work: Work, resume: bool, force: bool, opened: contextlib.ExitStack
) -> Start:
    """Find where the run begins, its folder locked until ``opened`` closes; main process only."""
    from comlrl.loop.resume import prepare
    from comlrl.loop.run_lock import hold

    start = prepare(config, resume, force, work.sources)
    opened.enter_context(hold(start.run_dir))
    return start


def _write_pages(config: Config, run_dir: Path, *, card: bool = False) -> bool:
    """Write the report, and the ``card`` of the model; return whether there is a report.

    The run's results are safe on the disk, so a failure here is reported and does not fail the run.
    """
    try:
        if card:
            from comlrl.loggers.model_card import write_model_card

            write_model_card(run_dir, config.section.paper)
    except Exception as error:
        print_error(f"no model card: {_kind_and_text(error)}")
    try:
        from comlrl.loggers.report.write import write_report

        write_report(run_dir)
    except Exception as error:
        again = f"python -m {LAUNCH} report {shlex.quote(str(run_dir))}"
        print_error(f"no report: {_kind_and_text(error)}; try again: {again}")
        return False
    return True


def _kind_and_text(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def _stopped(error: Exception, loop: Loop, raises: bool = False) -> int:
    """Handle an error in the middle of a run; raise it again where it is not the user's or the
    disk's."""
    from safetensors import SafetensorError

    from comlrl.processes import distributed
    from comlrl.update.non_finite import explanation

    if distributed.lost_peer(error):
        return _left_alone()
    known = in_one_line(error)
    if isinstance(error, OSError) and known is not None:
        known = f"{known[0]}; once that is fixed, continue with --resume", known[1]
    if isinstance(error, NonFiniteError):
        known = explanation(error, loop.counters.steps + 1, loop.run_dir), 1
    elif isinstance(error, SafetensorError):  # of a full disk: nothing is read by now
        text = f"weights could not be saved: {one_line(str(error))}"
        known = f"{text}; once that is fixed, continue with --resume", 1
    if known is None:
        raise error
    if raises:
        raise UserError(known[0]) from error
    print_error(known[0])
    return known[1]


def _left_alone() -> int:
    """End a process that waits for another that has ended; return the exit code."""
    if os.environ.get("RANK", "0") == "0":
        print("interrupted: another process has ended (see its message)", file=sys.stderr)
    return 1


def _leave(loop: Loop) -> None:
    """Save what was done before a step whose sampling cannot be finished."""
    from comlrl.processes import distributed

    main = distributed.is_main()
    path = loop.leave() if main or loop.processes.lock_step else None
    if main:
        where = f"saved {path}; continue with --resume" if path else "nothing new to save yet"
        print(f"interrupted: {where}", file=sys.stderr)


def _open(
    start: Start,
    work: Work,
    build: Build,
    signals: Signals,
    force: bool,
    opened: contextlib.ExitStack,
) -> tuple[Run[CommonConfig], Trainer]:
    """Assemble the run and its trainer, resumed if configured so; ``opened`` closes it all."""
    from comlrl.loop import checkpoint
    from comlrl.loop.resume import write_config
    from comlrl.processes import cpu_threads, distributed, sharding
    from comlrl.rollout.overlap import OverlappedRollout

    load = cpu_threads.LoadWatch()
    distributed.check_gpus()
    distributed.from_main(lambda: vllm.check(start.config, work.roles))
    check_devices(start.config)
    sharding.check(start.config, start.config.section.fits_reward_model)
    deterministic()
    allocator.keep_freed()
    found = None if start.checkpoint is None else checkpoint.read(start.checkpoint)
    tasks = distributed.from_main(lambda: load_both_splits(start.config, work.domain))
    load.set_threads(None if found is None else found.state)
    run = assemble(start, work, signals, *tasks, resume=found is not None)
    opened.callback(_closing(run.reward))
    if run.server is not None:
        opened.callback(run.server.close)
    if isinstance(run.rollout, OverlappedRollout):
        opened.callback(run.rollout.close)
    opened.callback(_closing(run.loop.logger))
    trainer = build(run)
    if found is not None:
        run.loop.resume(found, trainer, force=force)
    if distributed.is_main():
        own_algorithm.keep(start.run_dir, start.config.algorithm, type(start.config.section))
        write_config(start)
    run.loop.logger.begin(run.loop.mark)
    return run, trainer


def _closing(closed: Logger | Reward) -> Callable[[], None]:
    def close() -> None:
        try:
            closed.close()
        except (OSError, UserError) as error:  # the error that ended the run is the one to tell
            print_error(str(error))

    return close


def _finish(run: Run[CommonConfig]) -> None:
    """Write the final model and the summary."""
    from comlrl.loop.summary import write_summary
    from comlrl.processes import distributed

    run.loop.progress.begin("saving the result")
    final, networks = run.run_dir / FINAL_MODEL, heterogeneous_policy(run.rollout.sampler)
    if run.config.keeps_final_model:  # a continued run already has an earlier one
        partial, old = (run.run_dir / f".{final.name}.{name}" for name in ("partial", "old"))
        if distributed.is_main():
            files.remove(partial)
        run.save(partial)
        if distributed.is_main():
            files.put_in_place(partial, final, old)
    elif networks and run.config.output.save_final_model == "auto" and distributed.is_main():
        networks.save(final)  # SHPPO's are small
    write_summary(run.loop, run.config.algorithm)
    if text := run.loop.log.alarm.summary():
        notice(text)
