"""The models that a run starts from, and the weights of ``init_from``.

Torch is imported only when weights are read, so a wrong path is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl.builtin import MODELS
from comlrl.config.paths import searched
from comlrl.config.resolved import Config
from comlrl.config.sections import LoraSection
from comlrl.errors import UserError, near
from comlrl.run_files import ADAPTER, CONFIG, HETEROGENEOUS, agent_folders
from comlrl.trainers.launch.wiring import hub, weights
from comlrl.trainers.launch.wiring.model_size import is_target, model_size

if TYPE_CHECKING:
    from comlrl.models.team import Team
    from comlrl.types import Sampler

# PEFT settings of a plain LoRA adapter; other values would change what it computes.
PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "use_dora": False, "use_rslora": False, "lora_bias": False,
    "bias": "none", "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "layer_replication": None, "alora_invocation_tokens": None, "use_qalora": False,
    "use_bdlora": None, "arrow_config": None, "kasa_config": None, "monteclora_config": None,
    "target_parameters": [], "trainable_token_indices": None,
}  # fmt: skip
# Values of init_lora_weights that leave the base weights unchanged; PiSSA and others change them.
BASE_STAYS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
TRANSPOSED = ("gpt2", "openai-gpt")  # use Conv1D layers, for which PEFT sets fan_in_fan_out


@dataclass(frozen=True, kw_only=True)
class Source:
    """The initial weights, as described by their own files."""

    name: str  # as the user wrote it
    lora: bool
    ranks: tuple[tuple[int, float], ...]  # (r, alpha) of each agent; empty where unknown
    bases: tuple[str, ...]  # models of the agents; empty where unknown
    agents: int  # number of models or adapters; 1 with SHPPO
    sizes: Mapping[str, int] | None  # sizes of SHPPO's networks, if any


def check_models(named: Iterable[tuple[str, str]], beside: Path) -> None:
    """Raise UserError if a name among these (key, name) pairs is the folder of an adapter or of a
    run, or is neither a folder nor a name on the hub."""
    for key, name in named:
        hub.check_model(key, name, beside)
        folder = Path(name)
        if (folder / ADAPTER).is_file():
            base = weights.read_json(folder / ADAPTER).get("base_model_name_or_path")
            whence = folder.parent if key.startswith("agents") else folder
            raise UserError(
                f"{key}: '{name}' holds an adapter, which needs its base; set the base ('{base}') "
                f"there, and init_from={whence}"
            )
        runs = (folder / "agent_0").is_dir() or (folder / CONFIG).is_file()
        if runs and not (folder / "config.json").is_file():
            raise UserError(
                f"{key}: '{name}' holds a run and no model; use the model that it was trained on, "
                f"and set init_from={name}"
            )


def check_target_modules(
    lora: LoraSection, models: Sequence[str], key: str = "lora.target_modules"
) -> None:
    """Raise UserError, naming the key, if an adapter's ``target_modules`` names layers that no
    available model has."""
    modules = lora.target_modules
    if not lora.enabled or modules == "all-linear":
        return
    layers = [modules] if isinstance(modules, str) else modules
    listed = isinstance(layers, list | tuple) and len(layers) > 0
    if not listed or not all(isinstance(layer, str) for layer in layers):
        raise UserError(f"{key}: {modules!r}; set all-linear or a list of the names of layers")
    wanted: list[str | list[str]] = (
        [modules] if isinstance(modules, str) else [[w] for w in modules]
    )
    for name in models:
        size = model_size(name)
        if size.linear is None:
            continue
        for each in wanted:
            if other := sorted(layer for layer in size.nonlinear if is_target(layer, each)):
                raise UserError(
                    f"{key}: {modules!r} names '{other[0]}' of '{name}', which is no "
                    "linear layer and gets no trained adapter; leave it out"
                )
            if not any(is_target(layer, each) for layer in size.layers):
                missing = each if isinstance(each, str) else each[0]
                linear = sorted({layer.rpartition(".")[2] for layer in size.linear})
                raise UserError(
                    f"{key}: '{missing}' is not a layer of '{name}'; "
                    + near(missing, linear, "choose from {}")
                )


def begin(config: Config, team: Team, sampler: Sampler) -> None:
    """Load the weights of ``init_from`` into a new team, and into SHPPO's sampler.

    Raises UserError if they do not fit.
    """
    source, _ = check(config)
    held = weights.read_start(Path(source.name))
    networks = held.pop(HETEROGENEOUS, None)
    if source.agents == 1:
        held = {agent.adapter: held["agent_0"] for agent in team.agents}
    try:
        team.begin_with(held)
        if networks is not None and config.section.heterogeneous:
            sampler.policy.load_state_dict(networks)  # type: ignore[attr-defined]
    except (UserError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"init_from: '{source.name}' does not fit this run's models: {reason}; use the model "
            "and the lora.target_modules that it was trained with"
        ) from error


def read_source(name: str, models: Sequence[str], beside: Path) -> Source:
    """Describe the weights in the folder that ``init_from`` names. Raises UserError if there are
    none.

    Args:
        models: the agents' models, which the adapters have to fit.
        beside: the configuration's folder, against which paths are resolved.
    """
    path = Path(name)
    if not path.exists():
        raise UserError(
            f"init_from: '{name}' does not exist: {searched(beside)}; use a run, or a folder of "
            "adapters"
        )
    if (path / ADAPTER).is_file():
        r, alpha, base = _adapter(path, name, models)
        return Source(
            name=name, lora=True, ranks=((r, alpha),), bases=(base,), agents=1,
            sizes=None,
        )  # fmt: skip
    if (path / "config.json").is_file():
        raise UserError(
            f"init_from: '{name}' is a whole model; set it as agent_model.name, or among agents"
        )
    place = weights.locate(path, "init_from")
    if place.final_model is not None:
        return _of_folder(name, place.final_model, models)
    assert place.run_dir is not None
    run = weights.load_run(place.run_dir)
    count = run.section.policies
    return Source(
        name=name,
        lora=run.lora.enabled,
        ranks=tuple((lora.r, lora.effective_alpha) for lora in run.loras[:count]),
        bases=run.model_names,
        agents=count,
        sizes=_sizes(weights.of_run(run)),
    )


def _of_folder(name: str, folder: Path, models: Sequence[str]) -> Source:
    """Describe a folder of agent_0/, agent_1/, …"""
    facts, agents = weights.of_folder(folder), agent_folders(folder)
    adapters = [_adapter(agent, name, models) for agent in agents] if facts["lora.enabled"] else []
    return Source(
        name=name,
        lora=facts["lora.enabled"],
        ranks=tuple((r, alpha) for r, alpha, _ in adapters),
        bases=tuple(base for _, _, base in adapters),
        agents=len(agents),
        sizes=_sizes(facts),
    )


def _sizes(facts: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the sizes of SHPPO's networks, if there are any."""
    if not facts[HETEROGENEOUS]:
        return None
    return {key: facts[key] for key in weights.SIZES.values()}


def _adapter(folder: Path, name: str, models: Sequence[str]) -> tuple[int, float, str]:
    """Read r, alpha and base of an adapter. Raises UserError if it is not a plain LoRA.

    ``models``: the agents' models.
    """
    adapter = weights.adapter_settings(folder / ADAPTER)
    for key, plain in PLAIN.items():
        if adapter.get(key, plain) not in (plain, None):
            raise UserError(
                f"init_from: '{name}' sets {key}={adapter[key]!r} in its {ADAPTER}; use a plain "
                f"LoRA adapter ({key}={plain!r})"
            )
    start = adapter.get("init_lora_weights")
    if start not in BASE_STAYS:
        raise UserError(
            f"init_from: '{name}' sets init_lora_weights={start!r} in its {ADAPTER}, which changes "
            "its base's weights; save it with path_initial_model_for_weight_conversion, as a plain "
            "LoRA"
        )
    if adapter.get("fan_in_fan_out") and not any(map(_may_be_transposed, models)):
        raise UserError(
            f"init_from: '{name}' sets fan_in_fan_out=True in its {ADAPTER}, and '{models[0]}' has "
            "no transposed layers; use an adapter of this model"
        )
    return adapter["r"], float(adapter["lora_alpha"]), str(adapter.get("base_model_name_or_path"))


def _may_be_transposed(model: str) -> bool:
    """Return whether a model stores its layers' weights transposed, or is not available locally."""
    folder = hub.model_folder(model)
    if folder is None or not (folder / "config.json").is_file():
        return True
    return weights.read_json(folder / "config.json").get("model_type") in TRANSPOSED


def check(config: Config) -> tuple[Source, list[str]]:
    """Describe the weights of ``init_from``; also return notices. Raises UserError if they do not
    match the run's configuration."""
    source = read_source(str(config.init_from), config.agent_models, config.beside)
    where, section, lora = f"init_from: '{source.name}'", config.section, config.lora
    if source.lora != lora.enabled:
        held = "LoRA adapters" if source.lora else "all weights of whole models"
        fix = f"set lora.enabled={str(source.lora).lower()}"
        more = "" if source.lora else ", or set agents to these models, and init_from=null"
        raise UserError(f"{where} holds {held}; {fix}{more}")
    wanted = section.policies
    ranks = source.ranks * wanted if source.agents == 1 else source.ranks
    roles = list(config.agents) if isinstance(config.agents, Mapping) else []
    for i, ((rank, scale), lora) in enumerate(zip(ranks, config.loras, strict=False)):
        key = "lora.r" if config.team[i].lora is None else f"agents.{roles[i]}.lora.r"
        if rank != lora.r:
            raise UserError(f"{where} holds adapters of rank {rank}; set {key}={rank}")
        if scale != lora.effective_alpha:
            raise UserError(f"{where} holds adapters of alpha {scale:g}; set lora.alpha={scale:g}")
    if source.agents not in (1, wanted):
        shared = " with one policy" if section.one_policy else ""
        raise UserError(
            f"{where} holds {source.agents} agents, and "
            f"{config.algorithm}.num_agents={section.num_agents}{shared}; use the folder of one of "
            f"them, e.g. {source.name}/final_model/agent_{source.agents - 1}, and all start from "
            "that"
        )
    notices = []
    if source.agents < wanted:
        notices.append(f"{where} holds one agent, from which all {wanted} start")
    if source.sizes is not None and not section.heterogeneous:
        notices.append(f"{where} is of SHPPO; its adapter is used, its networks are not")
    elif source.sizes is not None:
        for key, size in source.sizes.items():
            if getattr(section, key) != size:
                raise UserError(f"{where} holds networks of another size; set shppo.{key}={size}")
    bases = list(map(_resolved, config.agent_models))
    for base in dict.fromkeys(source.bases):
        if _resolved(base) not in bases:
            notices.append(
                f"{where} was trained on '{base}', and this run's base is "
                f"'{config.agent_models[0]}'"
            )
    return source, notices


def _resolved(name: str) -> str:
    """Resolve a model to its folder: a builtin's, or the name itself."""
    return str(MODELS[name]) if name in MODELS else name.rstrip("/")
