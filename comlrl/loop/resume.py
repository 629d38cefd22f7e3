"""Starts or resumes a run: finds its directory, configuration and checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from comlrl import files
from comlrl.config.plugins.modules import MODULES, Source, digests, keep, stored_digests
from comlrl.config.resolved import Config
from comlrl.config.yaml_values import load_yaml
from comlrl.errors import UserError, notice
from comlrl.loop import checkpoint
from comlrl.loop.run_directory import (
    check_free,
    find,
    holds_run,
    make_writable,
    move_aside,
)
from comlrl.loop.traces import FolderSnapshot
from comlrl.run_files import CHECKPOINTS, CONFIG, SUMMARY

HARMLESS_SECTIONS = ("output", "wandb", "trackio", "distributed", "agent_devices")
HARMLESS_KEYS = (
    "logging_steps", "max_steps", "max_env_steps", "num_train_epochs", "save_steps",
    "save_total_limit", "eval_interval", "eval_num_samples", "eval_answers", "workers",
    "gradient_checkpointing", "max_batch_tokens", "max_support", "vllm_url", "vllm_command",
    "vllm_patience",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Start:
    """The directory, configuration and checkpoint that a run starts from."""

    config: Config  # with ``output.dir`` filled in
    run_dir: Path
    checkpoint: Path | None  # to continue from; None: start from scratch
    continuing: bool  # whether files in ``run_dir`` belong to this run
    sources: Sequence[Source] = ()  # the user's own modules
    before: FolderSnapshot | None = None  # of the folder, unless ``continuing``


def prepare(config: Config, resume: bool, force: bool, sources: Sequence[Source] = ()) -> Start:
    """Find or create the run directory, and the checkpoint to continue from. Main process only.

    ``sources``: the user's own modules. Raises UserError if the directory cannot be written, or
    contains a run that cannot be continued or has a different configuration or modules.
    """
    check_free(config.output, resume)
    name = f"{config.algorithm}_{config.dataset.short_name}_{config.seed}"
    folder = find(config.output, name, resume)
    newest = checkpoint.newest(folder) if resume and folder.exists() else None
    if newest is None and holds_run(folder):
        continues = resume and not config.output.overwrite
        _make_room(folder, config.algorithm, continues)
    before = FolderSnapshot.from_folder(folder)
    make_writable(folder)
    config = replace(config, output=replace(config.output, dir=str(folder), overwrite=False))
    changed = _changes(folder, config.to_dict(), sources)
    harmful = [change for change in changed if not change.harmless]
    if harmful and not force:
        raise UserError(_refusal(harmful))
    if newest is None and resume:
        notice(f"no checkpoint in {folder}: a fresh start")
    for change in changed if newest is not None else ():
        notice(f"resuming with {change}")
    continuing = newest is not None or (folder / CONFIG).exists()
    return Start(
        config=config,
        run_dir=folder,
        checkpoint=newest,
        continuing=continuing,
        sources=sources,
        before=None if continuing else before,
    )


def _make_room(folder: Path, algorithm: str, continues: bool) -> None:
    """Make room in a folder whose run has no checkpoint to continue from, by moving it aside.

    A run that is resumed after a kill before its first checkpoint stays in place, as it writes the
    same files again. Raises UserError if the run to resume is finished.
    """
    if continues:
        if (folder / SUMMARY).exists():
            raise UserError(
                f"--resume: '{folder}' holds a finished run and no checkpoint to continue from; "
                "set another output.dir, or output.overwrite=true to start over (checkpoints: "
                f"{algorithm}.save_steps)"
            )
        if not (folder / CHECKPOINTS).exists():
            return
    notice(f"the run in {folder} is kept in {move_aside(folder)}")


def write_config(start: Start) -> None:
    """Write ``config.yaml`` atomically, after copies of the user's modules, which it refers to."""
    keep(start.run_dir, start.sources)
    files.replace(start.run_dir / CONFIG, yaml.safe_dump(start.config.to_dict(), sort_keys=False))


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the earlier run's; None stands for an unset value."""

    key: str
    before: Any
    now: Any

    @property
    def harmless(self) -> bool:
        section, _, rest = self.key.partition(".")
        if section in HARMLESS_SECTIONS:
            return True
        # Users name prompts and the arguments of their rewards themselves.
        return section != "prompts" and rest.partition(".")[0] in HARMLESS_KEYS

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} → {self.now!r}"


def _changes(folder: Path, settings: Mapping[str, Any], sources: Sequence[Source]) -> list[Change]:
    """List changes of the configuration and of the user's modules since the run began."""
    if not (folder / CONFIG).exists():
        return []
    before, now = _flat(load_yaml(folder / CONFIG)), _flat(settings)
    before |= {f"{MODULES}/{name}": digest[:12] for name, digest in stored_digests(folder).items()}
    now |= {f"{MODULES}/{name}": digest[:12] for name, digest in digests(sources).items()}
    keys = sorted(before.keys() | now.keys())
    return [Change(k, before.get(k), now.get(k)) for k in keys if before.get(k) != now.get(k)]


def _refusal(harmful: list[Change]) -> str:
    first = harmful[0]
    others = ", ".join(change.key for change in harmful[1:])
    return (
        f"{first.key}: {first.now!r} differs from the run's {first.before!r}"
        f"{f'; so do {others}' if others else ''}; set it back, or add --resume-force"
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{key}.")
        elif value is not None and value != {}:
            flat[key] = value
    return flat
