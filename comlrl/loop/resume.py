"""The start of a run: its directory, configuration, and the checkpoint that it continues from."""

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
    checkpoint: Path | None  # to continue from; None: a fresh start
    continuing: bool  # what an earlier process left in ``run_dir`` is this run's own
    sources: Sequence[Source] = ()  # the user's own modules
    before: FolderSnapshot | None = None  # of a fresh start


def prepare(config: Config, resume: bool, force: bool, sources: Sequence[Source] = ()) -> Start:
    """Find and make the run directory and decide what the run continues from; main process only.

    ``sources``: the user's own modules. Raises UserError where the directory cannot be written,
    or holds a run that cannot be continued or is of another configuration or modules.
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
    """Make room where there is a run without a checkpoint to continue from; move it aside if it
    would be lost.

    One that was killed before its first checkpoint writes the same again, in its place. Raises
    UserError for one that has come to its end.
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
    """Write ``config.yaml`` atomically: a kill leaves the old file or the new one. Before it,
    write copies of the modules beside the file that was given, so that it finds them."""
    keep(start.run_dir, start.sources)
    files.replace(start.run_dir / CONFIG, yaml.safe_dump(start.config.to_dict(), sort_keys=False))


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the run's; None where it was not given."""

    key: str
    before: Any
    now: Any

    @property
    def harmless(self) -> bool:
        section, _, _ = self.key.partition(".")
        return section in HARMLESS_SECTIONS or self.key.rpartition(".")[2] in HARMLESS_KEYS

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} → {self.now!r}"


def _changes(folder: Path, settings: Mapping[str, Any], sources: Sequence[Source]) -> list[Change]:
    """List the changes of the configuration, and of the user's modules, against those of the
    run."""
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
