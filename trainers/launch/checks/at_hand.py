"""The checks of ``--dry-run``: everything that a run needs and this machine already has. No weights
are loaded and no network is used; each thing left unchecked is reported in a line.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from comlrl.config.resolved import CommonConfig, Config
from comlrl.config.sections import AgentModelConfig, DatasetConfig, OutputConfig
from comlrl.errors import UserError
from comlrl.tasks.json_rows import KINDS
from comlrl.trainers.launch.wiring import api, hub
from comlrl.trainers.launch.wiring.resolved_work import Work
from comlrl.trainers.launch.wiring.sampling_settings import sampling
from comlrl.trainers.launch.wiring.task_splits import fitting, load_both_splits

if TYPE_CHECKING:
    from comlrl.models.prompt_encoder import PromptEncoder
    from comlrl.types import Task

WEIGHTS = ("*.safetensors", "*.bin")


class AtHand(NamedTuple):
    """Properties of an agent's model that are known without its weights."""

    encoder: PromptEncoder
    positions: int  # the model's maximum context length


def check(
    config: Config, work: Work
) -> tuple[list[str], tuple[list[Task], list[Task]] | None, list[str]]:
    """Return the checks that were not possible, the training and evaluation tasks (None: not on
    this machine), and the form of the prompts.

    Raises UserError or a library's error for settings that a run would refuse.
    """
    unchecked: list[str] = []
    _check_writable(config.output)
    work.mode.build(work.prompts)
    work.build_reward().close()
    splits = None
    name = config.dataset.name
    readable = Path(name).suffix.lower() in KINDS
    if name.startswith("builtin:") or readable or Path(name).is_dir():
        splits = load_both_splits(config.dataset, config.section, work.domain)
    else:
        _check_splits(config.dataset)
        unchecked.append(
            f"dataset.name: '{name}' and its rows; not a local folder, so the hub is asked at the "
            "start"
        )
    agents = agents_at_hand(config, unchecked)
    if work.program is not None:
        unchecked.append(f"{work.program.target}; its calls are known once it is played")
    elif splits and agents:
        read = work.read_by(
            [
                agent.encoder if settings.api is None else None
                for agent, settings in zip(agents, config.team, strict=True)
            ]
        )
        length = config.context_length(min(agent.positions for agent in agents))
        fitting(
            [*splits[0], *splits[1]],
            read,
            config.dataset,
            lambda agent, prompt: agents[agent].encoder.encode(prompt),
            length,
            sampling(config, work.roles),
        )
    _check_inputs(config.section)
    for service in api.members(config.agents).values():
        unchecked.append(f"{service.setting}.base_url: '{service.base_url}'; not asked")
    if config.external.mode == "expert_edits" and config.section.num_turns > 1:
        unchecked.append(f"external.expert_model: '{config.external.expert_model}'; not asked")
    generation = config.generation
    if generation.backend == "vllm":
        if generation.vllm_command is None:
            unchecked.append(f"generation.vllm_url: {generation.vllm_url!r}; not asked")
        else:
            unchecked.append(f"generation.vllm_command: '{generation.vllm_command}'; not started")
    if config.agent_devices is not None:
        unchecked.append(
            f"agent_devices: {list(config.agent_devices)}; looked for when a run starts"
        )
    return unchecked, splits, prompt_forms(config.agent_models, agents)


def prompt_forms(models: Sequence[str], agents: Sequence[AtHand]) -> list[str]:
    """Return one line per model that says whether its prompts use a chat template, and why."""
    lines = []
    for name, agent in zip(models, agents, strict=False):
        chats, reason = agent.encoder.form
        form = "in the chat template" if chats else "plain text"
        lines.append(f"prompts of '{name}': {form}; {reason}")
    return list(dict.fromkeys(lines))


def _check_writable(output: OutputConfig) -> None:
    folder = path = Path(output.dir or output.base_dir).absolute()
    while not path.exists():
        path = path.parent
    try:
        tempfile.TemporaryDirectory(dir=path).cleanup()
    except OSError as error:
        key = "output.dir" if output.dir else "output.base_dir"
        raise UserError(
            f"{key}: '{folder}' cannot be written ({error.strerror}); choose another folder"
        ) from error


def _check_splits(section: DatasetConfig) -> None:
    """Raise UserError for a split of the hub's data that cannot be read."""
    import datasets

    for key in ("train_split", "eval_split"):
        split = getattr(section, key)
        try:
            datasets.ReadInstruction.from_spec(split)
        except ValueError:
            raise UserError(
                f"dataset.{key}: '{split}' is not a split; write e.g. test[:16]"
            ) from None


def agents_at_hand(config: Config, unchecked: list[str]) -> list[AtHand]:
    """Return the properties of each agent's model; [] if a model is not available locally."""
    keys = {name: key for key, name in config.agents_models}
    by_name = {name: _agent(config.agent_model, key, name, unchecked) for name, key in keys.items()}
    for other_key, name in config.other_models.items():
        _agent(config.agent_model, other_key, name, unchecked)
    agents = []
    for settings in config.team:
        if (agent := by_name[str(settings.model)]) is None:
            return []
        arguments = {**agent.encoder.template_arguments, **settings.template_arguments}
        encoder = dataclasses.replace(agent.encoder, template_arguments=arguments)
        agents.append(agent._replace(encoder=encoder))
    return agents


def _agent(ours: AgentModelConfig, key: str, name: str, unchecked: list[str]) -> AtHand | None:
    folder = hub.model_folder(name)
    if folder is None:
        unchecked.append(f"{key}: '{name}'; not a local folder, and not in the hub's cache")
        return None
    from transformers import AutoConfig, AutoTokenizer

    from comlrl.models.agent import positions_of
    from comlrl.models.pretrained import TOKENIZER_SAFETY, generation_config, load_failure
    from comlrl.models.prompt_encoder import PromptEncoder, end_ids

    local = name.startswith("builtin:") or Path(name).is_dir()
    trusted = bool(ours.model_kwargs.get("trust_remote_code", False))
    try:
        sizes = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        settings = {**TOKENIZER_SAFETY, **ours.tokenizer_kwargs}
        tokenizer = AutoTokenizer.from_pretrained(folder, **settings)
        tokenizer.add_special_tokens(dict(ours.special_tokens))
        ends = end_ids(generation_config(folder, trusted))
        if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
            raise OSError(f"no {' or '.join(WEIGHTS)} in {folder}")
    except Exception as error:  # readers raise many types
        reason = load_failure(error)
        if local:
            raise UserError(f"{key}: '{name}' cannot be loaded: {reason}") from error
        unchecked.append(f"{key}: '{name}'; the hub's cache holds only a part of it: {reason}")
        return None
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"agent_model.special_tokens: the tokenizer of '{name}' has no EOS token; set eos_token"
        )
    chat = ours.chat if key.startswith("agent") else "auto"
    encoder = PromptEncoder(tokenizer, chat, ends, ours.template_arguments)
    return AtHand(encoder, positions_of(sizes))


def _check_inputs(section: CommonConfig) -> None:
    """Check the files of earlier runs that MADPO or MARLHF uses."""
    inputs = section.inputs
    if "preferences" in inputs:
        from comlrl.preferences.candidates import preferences_file, read_sets

        read_sets(preferences_file(inputs["preferences"]), section.num_agents)
    if "reward_model" in inputs:
        from comlrl.preferences.reward_model import FACTS

        if not (Path(inputs["reward_model"]) / FACTS).is_file():
            raise UserError(
                f"marlhf.reward_model: '{inputs['reward_model']}' holds no {FACTS}; use the "
                "reward_model folder of an earlier run"
            )
