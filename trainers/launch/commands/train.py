"""The code shared by the train scripts: command line → configuration → run → summary.

Packages that load torch are imported inside functions, so that ``--help`` and mistakes in a
configuration are answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl.config.algorithms import CommonConfig
from comlrl.config.resolved import Config
from comlrl.errors import UserError, notice, print_error
from comlrl.files import tolerant_terminal
from comlrl.loop.parts import Trainer
from comlrl.loop.run_directory import check_free
from comlrl.quoting import one_line, printable
from comlrl.run_files import FINAL_MODEL, REPORT
from comlrl.trainers.launch.checks.shipped import LAUNCH
from comlrl.trainers.launch.commands.command_line import parse_arguments, resolve
from comlrl.trainers.launch.wiring import allocator, api, hub, init_from, own_algorithm, vllm
from comlrl.trainers.launch.wiring.assembly import Run, assemble, heterogeneous_policy
from comlrl.trainers.launch.wiring.life_cycle import LifeCycle, life_cycle
from comlrl.trainers.launch.wiring.machine import check_devices, deterministic
from comlrl.trainers.launch.wiring.resolved_work import Work
from comlrl.trainers.launch.wiring.sampling_settings import sampling
from comlrl.trainers.launch.wiring.task_splits import load_both_splits

if TYPE_CHECKING:
    from comlrl.loggers.report.run_data import Run as ReportedRun
    from comlrl.loop.interrupts import Signals
    from comlrl.loop.resume import Start

Build = Callable[[Run[Any]], Trainer]  # supplied by a train script, which knows its section's class


def main(
    algorithm: str,
    build: Build,
    argv: Sequence[str] | None = None,
    section: type | None = None,
) -> int:
    """Run a train script and return its exit code. ``section``: the section class of a custom
    algorithm."""
    tolerant_terminal()
    if section is not None:
        own_algorithm.add(algorithm, section)
    with life_cycle() as life:
        _main(algorithm, build, argv, life)
    return life.code


def _main(algorithm: str, build: Build, argv: Sequence[str] | None, life: LifeCycle) -> None:
    arguments = parse_arguments(algorithm, argv)
    config, work, notices = resolve(algorithm, arguments)
    first = os.environ.get("RANK", "0") == "0"
    only_checks = arguments.dry_run and not arguments.measure
    life.awaited = not only_checks  # without training, only the first process checks
    if first:
        notices += check(config, arguments.resume)
        for text in notices:
            notice(text)
        if arguments.dry_run:
            _dry_run(config, work, arguments.check_solutions)
    if only_checks:
        return
    if arguments.measure:
        _measure(algorithm, arguments, config, build, life)
    else:
        execute(config, work, build, life, arguments.resume, arguments.resume_force)


def check(config: Config, resume: bool) -> list[str]:
    """Return notices. Raises UserError for anything missing on this machine or in the run's
    folder."""
    if config.trackio is not None and importlib.util.find_spec("trackio") is None:
        raise UserError("trackio: trackio is not installed; pip install trackio")
    api.members(config.agents)
    check_free(config.output, resume)
    hub.check_data(config.dataset.name, config.beside)
    models = config.named_models
    init_from.check_models(models, config.beside)
    roles = list(config.agents) if isinstance(config.agents, Mapping) else []
    for agent, (lora, name) in enumerate(zip(config.loras, config.agent_models, strict=True)):
        changed = config.team[agent].lora
        named = changed is not None and changed.target_modules is not None
        key = f"agents.{roles[agent]}.lora.target_modules" if named else "lora.target_modules"
        init_from.check_target_modules(lora, [name], key)
    init_from.check_target_modules(config.lora, list(config.other_models.values()))
    notices = [config.no_weights] if config.no_weights else []
    fixed = any(not agent.train for agent in config.team)  # checkpoints lack untrained agents
    tasks, processes = config.section.batch_size, int(os.environ.get("WORLD_SIZE", "1"))
    if tasks < processes:
        notices.append(
            f"{config.algorithm}.batch_size: {tasks}, so {processes - tasks} of {processes} "
            f"processes have no task in a step; use {processes} or more"
        )
    if config.init_from is not None and (fixed or not resume):
        notices = init_from.check(config)[1] + notices
    return notices


def _dry_run(config: Config, work: Work, solutions: bool) -> None:
    """Check what is available, then print the cost, the solutions' pass count, and what was left
    unchecked. Raises UserError."""
    from comlrl.trainers.launch.checks.at_hand import check
    from comlrl.trainers.launch.checks.solutions import check_solutions
    from comlrl.trainers.launch.cost.dry_run import describe

    unchecked, splits, forms = check(config, work)
    limits_N = sampling(config, work.roles).limits(len(work.roles))
    train, held_out = splits or ([], [])
    rows = (len(train), len(held_out)) if splits else None
    lines = [describe(config, limits_N, rows), *forms]
    lines += check_solutions(train + held_out, work, config.section.num_agents, score=solutions)
    print(printable("\n".join(lines)))
    for line in unchecked:
        print(printable(f"not checked: {line}"))


def _measure(
    algorithm: str, arguments: argparse.Namespace, config: Config, build: Build, life: LifeCycle
) -> None:
    """Train for a few steps in a temporary folder, and print the estimated cost of the run."""
    from comlrl.trainers.launch.cost.measured import describe_measured, overrides

    run_dir = Path(life.opened.enter_context(tempfile.TemporaryDirectory())) / "run"
    arguments.override += overrides(config, run_dir)
    measured, work, _ = resolve(algorithm, arguments)
    execute(measured, work, build, life, pages=False)
    if os.environ.get("RANK", "0") == "0":
        train, _ = load_both_splits(config.dataset, config.section, work.domain)
        print(describe_measured(config, measured, run_dir, len(train)))


def execute(
    config: Config,
    work: Work,
    build: Build,
    life: LifeCycle,
    resume: bool = False,
    force: bool = False,
    pages: bool = True,
) -> None:
    """Build the run, train, and write the results into the run directory.

    ``pages``: also write the report and the model card. Errors are left to ``life``.
    """
    named = [("dataset.name", config.dataset.name), *config.named_models]
    hub.check_reachable(named, config.beside)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from comlrl.loop.resume import prepare
    from comlrl.loop.run_lock import hold
    from comlrl.processes import distributed

    opened = life.opened.enter_context(contextlib.ExitStack())
    distributed.start()
    opened.callback(distributed.stop)

    def begin() -> Start:
        start = prepare(config, resume, force, work.sources)
        opened.enter_context(hold(start.run_dir))
        return start

    start = distributed.from_main(begin)
    run_dir = start.run_dir
    if distributed.is_main() and start.before is not None:
        opened.callback(start.before.restore)  # runs after the loggers are closed
    run, trainer = _open(start, work, build, life.signals, force, opened)
    distributed.all_gather("open")  # failures to open are reported here
    gc.freeze()  # scanning all loaded modules would stop a step for a third of a second

    def write_pages() -> None:
        if _write_pages(run_dir):
            print(printable(f"report: {run_dir / REPORT}"))

    life.begin_training(run.loop, write_pages)
    trainer.train()
    _finish(run)
    opened.close()
    if distributed.is_main() and pages:
        weights = config.keeps_final_model or config.output.save_best
        written = _write_pages(run_dir, config.section.paper if weights else None)
        if config.no_weights:
            notice(config.no_weights)
        if written:
            from comlrl.loggers.report.write import learned

            if text := learned(written):
                print(printable(f"learned: {text}"))
        where = f"curves and episodes in {run_dir / REPORT}" if written else run_dir
        print(printable(f"done: {where}"))


def _write_pages(run_dir: Path, paper: str | None = None) -> ReportedRun | None:
    """Write the report and, if ``paper`` is set, the model card, which cites it. Return the run as
    read for the report; None if that failed.

    The run's results are already on disk, so a failure here is reported and does not fail the run.
    """
    try:
        if paper is not None:
            from comlrl.loggers.model_card import write_model_card

            write_model_card(run_dir, paper)
    except Exception as error:
        print_error(f"no model card: {_kind_and_text(error)}")
    try:
        from comlrl.loggers.report.write import write_report

        return write_report(run_dir)
    except Exception as error:
        again = f"python -m {LAUNCH} report {shlex.quote(str(run_dir))}"
        print_error(f"no report: {_kind_and_text(error)}; try again: {again}")
        return None


def _kind_and_text(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def _open(
    start: Start,
    work: Work,
    build: Build,
    signals: Signals,
    force: bool,
    opened: contextlib.ExitStack,
) -> tuple[Run[CommonConfig], Trainer]:
    """Assemble the run and its trainer, resumed from a checkpoint if any; ``opened`` closes
    them."""
    from comlrl.loop import checkpoint
    from comlrl.loop.resume import write_config
    from comlrl.models import sharding
    from comlrl.processes import cpu_threads, distributed

    load = cpu_threads.LoadWatch()
    distributed.check_gpus()
    config = vllm.served(start.config, work.roles, start.run_dir, opened)
    distributed.from_main(lambda: vllm.check(config, work.roles))
    if start.config.agent_devices is not None:
        check_devices(start.config.agent_devices, start.config.shares_base)
    if start.config.distributed.strategy == "fsdp":
        sharding.check()
    deterministic()
    allocator.keep_freed()
    restored = None if start.checkpoint is None else checkpoint.read(start.checkpoint)
    tasks = distributed.from_main(
        lambda: load_both_splits(config.dataset, config.section, work.domain)
    )
    load.set_threads(None if restored is None else restored.state)
    # config.yaml, from ``start``, does not contain the addresses of servers that this run started.
    served = replace(start, config=config)
    run = assemble(served, work, signals, *tasks, opened)
    trainer = build(run)
    if restored is not None:
        run.loop.resume(restored, trainer, force=force)
    if distributed.is_main():
        own_algorithm.keep(start.run_dir, start.config.algorithm, type(start.config.section))
        write_config(start)
    run.loop.logger.begin(run.loop.mark)
    return run, trainer


def _finish(run: Run[CommonConfig]) -> None:
    """Write the final model and the summary."""
    from comlrl.loop.best_model import replace_folder
    from comlrl.loop.summary import write_summary
    from comlrl.processes import distributed

    run.loop.progress.begin("saving the result")
    final, networks = run.run_dir / FINAL_MODEL, heterogeneous_policy(run.rollout.sampler)
    if run.config.keeps_final_model:  # replaces that of the run before it continued
        replace_folder(final, run.save)
    elif networks and run.config.output.save_final_model == "auto" and distributed.is_main():
        networks.save(final)  # SHPPO's networks are small
    write_summary(run.loop, run.config.algorithm)
    if text := run.loop.log.alarm.summary():
        notice(text)
