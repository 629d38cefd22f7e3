"""Trained weights on disk: finding them under a path, and loading them into a team.

Torch is imported only when weights are read, so a wrong path is reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl.config.algorithms import Algorithms, CommonConfig, sections_of
from comlrl.config.loader import Loader
from comlrl.config.resolved import Config
from comlrl.config.yaml_values import Setting, load_yaml
from comlrl.errors import UserError
from comlrl.quoting import one_line
from comlrl.run_files import (
    ADAPTER,
    BEST_MODEL,
    CHECKPOINTS,
    CONFIG,
    FINAL_MODEL,
    HETEROGENEOUS,
    STATE,
    agent_folders,
)
from comlrl.trainers.launch.wiring import own_algorithm

if TYPE_CHECKING:
    import torch

    from comlrl.models.team import Team
    from comlrl.types import Sampler

MODEL_KEYS = ("name", "tokenizer_kwargs", "model_kwargs", "special_tokens")
WORK = (  # keys that describe the work that a team was trained on
    "domain", "prompts", "reward.target", "reward.arguments", "program.target",
    "program.command", "program.agents",
)  # fmt: skip
LORA = {"lora.r": "r", "lora.alpha": "lora_alpha", "lora.target_modules": "target_modules"}
SIZES = {"latent_dim": "latent_dim", "hidden": "latent_hidden", "rank": "heterogeneous_rank"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The location of a team's weights: the first path field that is set."""

    name: str  # as the user wrote it
    model: Path | None = None  # an ordinary transformers model, for every agent
    final_model: Path | None = None  # folder of agent_0/, agent_1/, …
    checkpoint: Path | None = None  # checkpoints/step_NNNNNN of a run
    run_dir: Path | None = None  # their run, whose newest valid checkpoint is the last resort

    @property
    def config_file(self) -> Path | None:
        return self.run_dir / CONFIG if self.run_dir else None

    @property
    def weights(self) -> str:
        """Return ``final_model``, ``step_NNNNNN`` or the model's folder, after ``pinned``."""
        place = self.model or self.final_model or self.checkpoint
        assert place is not None
        return place.resolve().name


def locate(path: str | Path, option: str = "--checkpoint") -> Trained:
    """Locate the weights in a run directory, a ``final_model``, a checkpoint or a model folder.

    In a run, the final model takes precedence over the newest checkpoint, and that over the best
    model. Raises UserError, naming ``option``, if there are no weights.
    """
    name, path = str(path), Path(path)
    if (path / "agent_0").is_dir():
        run = path.parent if (path.parent / CONFIG).is_file() else None
        return Trained(name=name, final_model=path, run_dir=run)
    if (path / STATE).is_file() and path.parent.name == CHECKPOINTS:
        return Trained(name=name, checkpoint=path, run_dir=path.parent.parent)
    if (path / CONFIG).is_file():
        if (path / FINAL_MODEL / "agent_0").is_dir():
            return Trained(name=name, final_model=path / FINAL_MODEL, run_dir=path)
        if any((path / CHECKPOINTS).glob("step_*")):
            return Trained(name=name, run_dir=path)
        if (path / BEST_MODEL / "agent_0").is_dir():
            return Trained(name=name, final_model=path / BEST_MODEL, run_dir=path)
        raise UserError(
            f"{option}: '{name}' is a run without weights; train with output.save_final_model=true "
            "or <algorithm>.save_steps"
        )
    if (path / "config.json").is_file():
        return Trained(name=name, model=path)
    if (path / ADAPTER).is_file():
        raise UserError(f"{option}: '{name}' holds one agent of a team; use the folder above it")
    what = "holds no run, final_model or checkpoint" if path.exists() else "does not exist"
    raise UserError(f"{option}: '{name}' {what}; name a run directory or a model folder")


def run_algorithm(tree: Mapping[str, Any], algorithms: Algorithms, file: str) -> str:
    """Return the algorithm whose section a file contains. Extra sections that it reads are allowed.

    Raises UserError if there is none, or more than one.
    """
    sections = [name for name in algorithms if name in tree]
    fitting = [name for name in sections if set(sections) <= set(sections_of(name, algorithms))]
    if len(fitting) == 1:
        return fitting[0]
    if sections:
        raise UserError(
            f"--config: '{file}' contains the sections {', '.join(sections)}; remove all but one"
        )
    raise UserError(
        f"--config: '{file}' contains no algorithm's section; add one of {', '.join(algorithms)} "
        "(for your own algorithm, use the config.yaml of its run)"
    )


def settings(
    trained: Trained, algorithm: str, algorithms: Algorithms, source: str
) -> list[Setting]:
    """Return the settings stored with the weights, for use with ``algorithm``: base model, LoRA,
    number of agents."""
    if trained.model is not None:
        return [Setting("agent_model.name", str(trained.model), source)]
    facts = {} if trained.final_model is None else of_folder(trained.final_model)
    if trained.config_file is not None:
        facts |= of_run(read_config(trained.config_file, algorithms).build())
    fitting = [name for name, section in algorithms.items() if _fits(facts, section)]
    if algorithm not in fitting:
        needed = "another algorithm" if len(fitting) > 1 else fitting[0]
        raise UserError(
            f"--config: its section is `{algorithm}`, and the weights of '{trained.name}' need "
            f"that of {needed}; leave --config out, or use the run's own"
        )
    facts.pop(HETEROGENEOUS)
    if not algorithms[algorithm].may_share_policy:
        facts.pop("shared_policy", None)
    section_keys = ("num_agents", "shared_policy", "latents", *SIZES.values())
    return [
        Setting(f"{algorithm}.{k}" if k in section_keys else k, v, source) for k, v in facts.items()
    ]


def _fits(facts: Mapping[str, Any], section: type[CommonConfig]) -> bool:
    """Return whether an algorithm's agents can use weights with these settings."""
    if facts[HETEROGENEOUS] or section.heterogeneous:
        return facts[HETEROGENEOUS] == section.heterogeneous
    return not facts.get("shared_policy") or section.may_share_policy


def load_run(folder: Path) -> Config:
    """Return the configuration of a run. Older spellings are read without a notice.

    Raises UserError if the file is damaged.
    """
    return read_config(folder / CONFIG, own_algorithm.all_sections(folder)).build()


def read_config(file: Path, algorithms: Algorithms) -> Loader:
    """Return a loader with the settings of a file, whichever of these algorithms it is for."""
    algorithm = run_algorithm(load_yaml(file), algorithms, str(file))
    loader = Loader(algorithm, sections_of(algorithm, algorithms))
    loader.read(file)
    return loader


def of_run(config: Config) -> dict[str, Any]:
    """Return the settings of a run's weights, key → value: models, the work that they were trained
    on, and whether they are one policy with a latent for each agent (``heterogeneous``)."""
    section, networks = config.section, config.section.networks
    facts: dict[str, Any] = {f"agent_model.{k}": getattr(config.agent_model, k) for k in MODEL_KEYS}
    facts |= {f"lora.{key}": value for key, value in asdict(config.lora).items()}
    for key in WORK:
        head, _, name = key.partition(".")
        value = getattr(getattr(config, head), name) if name else getattr(config, head)
        facts[key] = dict(value) if isinstance(value, Mapping) else value
    facts["num_agents"] = section.num_agents
    if section.may_share_policy:
        facts["shared_policy"] = section.one_policy
    if networks is not None:
        facts |= networks._asdict()
    return facts | {"agents": config.to_dict()["agents"], HETEROGENEOUS: section.heterogeneous}


def of_folder(folder: Path) -> dict[str, Any]:
    """Return the settings of weights in a folder of agent_0/, agent_1/, …, like ``of_run``."""
    sizes = folder / HETEROGENEOUS / "config.json"
    facts: dict[str, Any] = {HETEROGENEOUS: sizes.is_file()}
    if sizes.is_file():
        held = read_json(sizes)
        facts |= {key: held[name] for name, key in SIZES.items()}
        facts["latents"] = held.get("latents", "learned")
    else:
        facts["num_agents"] = len(agent_folders(folder))
    file = folder / "agent_0" / ADAPTER
    if not file.is_file():
        return facts | {"lora.enabled": False}
    adapter = adapter_settings(file)
    return (
        facts
        | {"lora.enabled": True}
        | {key: adapter[adapter_key] for key, adapter_key in LORA.items()}
    )


def adapter_settings(file: Path) -> dict[str, Any]:
    """Return an adapter's settings in PEFT's format. Raises UserError if one of ``LORA`` is
    missing."""
    adapter = read_json(file)
    if missing := [key for key in LORA.values() if key not in adapter]:
        raise UserError(f"'{file}' contains no {missing[0]}; use a folder that PEFT saved")
    return adapter


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError, naming the file, if it does not contain one."""
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{file}' is damaged: {one_line(str(error))}") from error
    if not isinstance(held, dict):
        raise UserError(f"'{file}' is damaged: it holds no mapping")
    return held


def pinned(trained: Trained, option: str = "--checkpoint") -> Trained:
    """Pin the newest valid checkpoint if a run has no final model.

    Raises UserError if no checkpoint is complete.
    """
    from comlrl.loop import checkpoint

    if trained.model or trained.final_model or trained.checkpoint:
        return trained
    assert trained.run_dir is not None
    checkpoint_folder = checkpoint.newest(trained.run_dir)
    if checkpoint_folder is None:
        raise UserError(f"{option}: '{trained.name}' contains no complete checkpoint")
    return replace(trained, checkpoint=checkpoint_folder)


def read_weights(
    trained: Trained, option: str = "--checkpoint"
) -> dict[str, dict[str, torch.Tensor]]:
    """Read the tensors of each ``agent_N``, for ``Team.load_tensors``; with SHPPO also
    ``heterogeneous``.

    Raises UserError, naming ``option``, if they are damaged.
    """
    from safetensors import SafetensorError

    trained = pinned(trained, option)
    try:
        if trained.final_model is not None:
            folders = _components(trained.final_model, "")
            return {folder.name: _merged(folder.glob("*.safetensors")) for folder in folders}
        assert trained.checkpoint is not None
        files = _components(trained.checkpoint, ".safetensors")
        held = {file.stem: _merged([file]) for file in files}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{option}: '{trained.name}' is damaged: {error}") from error
    return {**_untrained(trained), **held}


def _untrained(trained: Trained) -> dict[str, dict[str, torch.Tensor]]:
    """Read a run's untrained agents, which its checkpoints lack, from its ``init_from``; leave out
    agents that equal their base model."""
    if trained.run_dir is None or not (trained.run_dir / CONFIG).is_file():
        return {}
    config = load_run(trained.run_dir)
    names = [f"agent_{i}" for i, agent in enumerate(config.team) if not agent.train]
    if not names or config.init_from is None:
        return {}
    start = read_start(Path(config.init_from))
    if start.keys() == {"agent_0"}:
        return dict.fromkeys(names, start["agent_0"])
    return {name: start[name] for name in names if name in start}


def read_start(place: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Read the weights of ``init_from``: a team's, or a single adapter. Raises UserError."""
    if (place / ADAPTER).is_file():
        return {"agent_0": read_adapter(place)}
    return read_weights(locate(place, "init_from"), "init_from")


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Read an adapter in PEFT's format. Raises UserError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(folder / "adapter_model.safetensors"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"init_from: '{folder}' is damaged: {error}") from error


def _merged(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Merge the tensors of a folder's shards."""
    from safetensors.torch import load_file

    return {name: t for file in sorted(files) for name, t in load_file(str(file)).items()}


def _components(folder: Path, ending: str) -> list[Path]:
    return [*folder.glob(f"agent_*{ending}"), *folder.glob(f"{HETEROGENEOUS}{ending}")]


def load_weights(trained: Trained, team: Team, sampler: Sampler) -> None:
    """Load the weights into a team, and with SHPPO into its sampler. Plain models need no loading:
    the team was built from them."""
    if trained.model is not None:
        return
    weights = read_weights(trained)
    try:
        team.load_tensors(weights)
        if HETEROGENEOUS in weights:
            sampler.policy.load_state_dict(weights[HETEROGENEOUS])  # type: ignore[attr-defined]
    except (KeyError, RuntimeError, ValueError) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UserError(
            f"--checkpoint: '{trained.name}' holds other weights than its configuration says: "
            f"{reason}"
        ) from error
