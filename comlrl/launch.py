"""The composition that the train scripts share: command line → configuration → run → summary.

This module, like the scripts, may import every room. Heavy ones are imported inside functions,
so that ``--help`` and a mistake in a configuration are answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from comlrl.config import Config, ConfigError, Loader, Setting, parse_override, parse_value
from trainers.configs import online_section, sections_of, temperature, top_k, top_p, validate

if TYPE_CHECKING:
    from comlrl.generation import Generator
    from comlrl.loop import Loop
    from comlrl.rollout import Rollout, Shape
    from comlrl.team import Team
    from comlrl.types import Reward, Sampling, Task

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
MODEL_NICKNAMES = {"qwen": "Qwen/Qwen2.5-Coder-1.5B"}


class Trainer(Protocol):
    def train(self) -> None: ...


@dataclass(frozen=True)
class Run:
    """Everything that a trainer is built from."""

    config: Config
    section: Any
    run_dir: Path
    team: Team
    generator: Generator
    reward: Reward
    rollout: Rollout
    loop: Loop
    sampling: Sampling
    shape: Shape
    train_tasks: list[Task]
    eval_tasks: list[Task]
    resume: bool  # --resume was given


def main(algorithm: str, build: Callable[[Run], Trainer], argv: Sequence[str] | None = None) -> int:
    """Run a train script; returns its exit code."""
    try:
        arguments = parse_arguments(algorithm, argv)
        config, notices = resolve(algorithm, arguments)
        for notice in notices:
            print(f"notice: {notice}", file=sys.stderr)
        if arguments.dry_run:
            from comlrl.dry_run import describe

            print(describe(config))
            return 0
        return execute(config, build, resume=arguments.resume, force=arguments.resume_force)
    except ValueError as error:
        if not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def is_user_error(error: ValueError) -> bool:
    """Mistakes of the user's come as ConfigError, or as errors that rooms name so."""
    return isinstance(error, ConfigError) or getattr(error, "user_error", False)


def parse_arguments(algorithm: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"Train a team with {algorithm.upper()}.",
        epilog="Keys: docs/configuration.md. The last of file, older flags and --override wins.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        default=DEFAULT_CONFIGS.get(algorithm),
        required=algorithm not in DEFAULT_CONFIGS,
        metavar="FILE",
        help="YAML file, e.g. configs/magrpo_quickstart.yaml",
    )
    parser.add_argument(
        "--override", nargs="*", action="extend", default=[], metavar="KEY=VALUE",
        help="dotted keys, e.g. magrpo.learning_rate=1e-4 seed=7",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument(
        "--resume-force", action="store_true", help="… even where the configuration has changed"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the cost, load no weights"
    )
    older = parser.add_argument_group("older flags, each a key of the configuration")
    for flag, key in FLAGS.items():
        count = "+" if flag == "turn_gradient_weights" else None
        shown = key.replace("<algo>", algorithm)
        older.add_argument(f"--{flag}", nargs=count, metavar="VALUE", help=shown)
    return parser.parse_args(argv)


def resolve(algorithm: str, arguments: argparse.Namespace) -> tuple[Config, list[str]]:
    """File, then older flags, then overrides; checked. Raises ConfigError."""
    loader = Loader(algorithm, sections_of(algorithm))
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
    config = loader.build()
    validate(config)
    return config, loader.notices


def execute(
    config: Config, build: Callable[[Run], Trainer], *, resume: bool, force: bool = False
) -> int:
    """Build everything, train, and leave the run directory; returns the exit code."""
    from comlrl import distributed
    from comlrl.loop import Interrupted

    distributed.start()
    try:
        return _execute(config, build, resume, force)
    except Interrupted as interrupted:
        print(f"interrupted: {interrupted}", file=sys.stderr)
        return interrupted.code
    finally:
        distributed.stop()


def _execute(config: Config, build: Callable[[Run], Trainer], resume: bool, force: bool) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import torch
    import yaml

    from comlrl import checkpoint, distributed

    started = time.monotonic()
    run_dir = run_directory(config, resume)
    tasks = load_both_splits(config)
    found = checkpoint.newest(run_dir) if resume else None
    config = replace(config, output=replace(config.output, dir=str(run_dir)))
    if found is not None or (resume and (run_dir / "config.yaml").exists()):
        from comlrl.resume import check_unchanged

        check_unchanged(run_dir / "config.yaml", config, force)
    run = assemble(config, run_dir, *tasks, resume=found is not None)
    run = replace(run, resume=resume)  # what was left before the first checkpoint counts as well
    try:
        trainer = build(run)
        if distributed.is_main():
            text = yaml.safe_dump(config.to_dict(), sort_keys=False)
            (run_dir / "config.yaml").write_text(text)
        if found is not None:
            run.loop.resume(found, trainer)  # type: ignore[arg-type]
            run.loop.logger.truncate_after(run.loop.counters.updates)  # type: ignore[attr-defined]
        trainer.train()
        if distributed.is_main():
            if config.output.save_final_model:
                run.team.save(run_dir / "final_model")
        from comlrl.summary import write_summary

        write_summary(run, time.monotonic() - started, torch.cuda.is_available())
    finally:
        run.loop.logger.close()
        run.reward.close()
    if distributed.is_main():
        from loggers.report import write_report

        write_report(run_dir)
        print(f"done: {run_dir}/report.html")
    return 0


def run_directory(config: Config, resume: bool) -> Path:
    """``output.dir``, or a free (resuming: the newest) numbered folder under ``base_dir``.

    Raises ConfigError where it cannot be written.
    """
    from comlrl import distributed

    path = _run_directory(config, resume)
    if distributed.is_main():
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"output.dir: '{path}' cannot be written ({error.strerror}); give another folder"
            ) from error
    return path


def _run_directory(config: Config, resume: bool) -> Path:
    if config.output.dir is not None:
        return Path(config.output.dir)
    kind = config.dataset.type or Path(config.dataset.name.replace(":", "/")).stem
    base = Path(config.output.base_dir) / f"{config.algorithm}_{kind}_{config.seed}"
    taken = [base, *(base.with_name(f"{base.name}_{n}") for n in range(2, 10_000))]
    free = next(i for i, path in enumerate(taken) if not (path / "config.yaml").exists())
    return taken[max(0, free - 1)] if resume else taken[free]


def load_both_splits(config: Config) -> tuple[list[Task], list[Task]]:
    """Training tasks and the first ``eval_num_samples`` evaluation tasks."""
    from comlrl.data import load_tasks
    from rewards.checks import check_task

    train = load_tasks(config.dataset, config.dataset.train_split, check=check_task)
    if not config.section.eval_interval:
        return train, []
    held_out = load_tasks(config.dataset, config.dataset.eval_split, check=check_task)
    return train, held_out[: config.section.eval_num_samples]


def assemble(
    config: Config, run_dir: Path, train: list[Task], held_out: list[Task], *, resume: bool
) -> Run:
    """Load models, start the reward's workers lazily, and wire the rooms together."""
    import loggers
    from comlrl import distributed
    from comlrl.generation import Generator, order, uniforms
    from comlrl.loop import Loop
    from comlrl.rollout import Shape
    from comlrl.team import build_team
    from comlrl.types import Sampling

    section = config.section
    reference = any(s.kl_coef > 0 for s in config.sections.values()) or bool(
        getattr(section, "dpo_reference", False)
    )
    team = build_team(config, reference=reference)
    generator = Generator(team, config.generation.max_batch_tokens, config.agent_model.max_length)
    sampling = Sampling(
        temperature(section, config),
        section.max_new_tokens,
        top_p(section, config),
        top_k(section, config),
    )
    reward = build_reward(config)
    rollout = build_rollout(config, generator, reward, uniforms)
    shape = Shape(
        section.num_agents,
        section.num_turns,
        section.num_generations,
        section.joint_mode,
        section.handoff,
        section.early_termination_threshold,
    )
    loop = Loop(
        online_section(config) if config.algorithm == "marlhf" else section,
        train,
        lambda epoch, count: order((config.seed, "epoch", epoch), count),
        run_dir=run_dir,
        logger=loggers.Loggers([]),
        evaluate=evaluator(rollout, held_out, shape, sampling) if held_out else None,
    )
    if distributed.is_main():
        loop.logger = loggers.build(config, run_dir, resume=resume, total=loop.total_steps)
    return Run(
        config, section, run_dir, team, generator, reward, rollout, loop, sampling, shape,
        train, held_out, resume,
    )  # fmt: skip


def build_reward(config: Config) -> Reward:
    from rewards.code_rewards import CodeReward

    sandbox = config.sandbox
    return CodeReward(
        workers=sandbox.workers,
        timeout=sandbox.timeout,
        memory_mb=sandbox.memory_mb,
        isolation=sandbox.isolation,
    )


def build_rollout(config: Config, sampler: Any, reward: Reward, uniforms: Any) -> Rollout:
    import external
    from comlrl.rollout import History, Rollout

    told = config.external
    processor = config.reward_processor
    scale, shift = (processor.scale_factor, processor.shift) if processor.enabled else (1.0, 0.0)
    return Rollout(
        sampler,
        reward,
        external.build(told),
        lambda key: float(uniforms(key, 1)[0]),
        seed=config.seed,
        history=History(told.history, told.original_prompt, told.previous_response),
        process=lambda reward: scale * reward + shift,
    )


def evaluator(
    rollout: Rollout, tasks: list[Task], shape: Shape, sampling: Sampling
) -> Callable[[], tuple[list, dict[str, float]]]:
    """Trees and metrics of the present policy on held-out tasks; ``turn_1/…`` and bare names."""
    from comlrl.evaluation import evaluate, mean_pass_at_k
    from loggers.metrics import tree_metrics

    def run() -> tuple[list, dict[str, float]]:
        trees = evaluate(rollout, tasks, shape, sampling)
        return trees, tree_metrics(trees) | {"pass@1": mean_pass_at_k(trees, 1)}

    return run
