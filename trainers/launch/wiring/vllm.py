"""``generation.backend: vllm``: checks of settings and servers, and construction of the client."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from comlrl.builtin import MODELS
from comlrl.config.resolved import Config
from comlrl.config.sections import GenerationConfig
from comlrl.errors import UserError, notice
from comlrl.rollout.vllm.replies import KEY
from comlrl.trainers.launch.wiring.model_size import is_target
from comlrl.trainers.launch.wiring.sampling_settings import sampling

PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")  # leaves ${NAME} to the shell
PLACEHOLDERS = ("model", "port", "device")

if TYPE_CHECKING:
    from comlrl.external.expert_edits import Fallbacks
    from comlrl.loop.steps import Step
    from comlrl.programs.rollout import ProgramRollout
    from comlrl.rollout.grow import Rollout
    from comlrl.rollout.overlap import OverlappedRollout
    from comlrl.rollout.vllm.sampler import VLLMSampler
    from comlrl.rollout.vllm.servers import Server, Servers
    from comlrl.trainers.launch.wiring.resolved_work import Work
    from comlrl.types import Sampling
    from comlrl.update.importance import ImportanceWeightedSampler


def refuse(config: Config) -> None:
    """Raise UserError for settings that a server, which holds one model and its adapters, does not
    support."""
    generation, section = config.generation, config.section
    if config.distributed.strategy == "fsdp":
        if generation.backend != "vllm":
            raise UserError(
                f"distributed.strategy: fsdp with generation.backend={generation.backend}, which "
                "would gather every layer for every token; set generation.backend=vllm, or "
                "distributed.strategy=replicate"
            )
        if section.fits_reward_model:
            raise UserError(
                f"distributed.strategy: fsdp with {config.algorithm}, whose reward model is "
                "trained whole; use replicate"
            )
    if generation.backend != "vllm":
        if generation.overlap:
            raise UserError(
                "generation.overlap: 1 with generation.backend=builtin, which samples with the "
                "weights that an update changes; set it to 0, or generation.backend=vllm"
            )
        return
    if generation.overlap and section.rounds is not None:
        raise UserError(
            f"generation.overlap: 1 with {config.algorithm}, which samples in rounds: what comes "
            "next is not known while a step updates; set it to 0"
        )
    key = "eval_interval" if section.save_steps is None else "save_steps"
    if generation.overlap and getattr(section, key) == 1:
        raise UserError(
            f"generation.overlap: 1 with {config.algorithm}.{key}=1: a step after a checkpoint is "
            "not sampled beforehand; set save_steps above 1, or overlap to 0"
        )
    backend = "generation.backend=vllm"
    if section.heterogeneous:
        raise UserError(
            f"{backend} with {config.algorithm}, whose agents differ by a layer before the "
            "language-model head, which no server supports; use builtin"
        )
    if not config.lora.enabled:
        raise UserError(
            f"lora.enabled: false with {backend}, to which adapters are sent after an update, not "
            "whole models; set it to true, or generation.backend=builtin"
        )
    for targets in (config.lora.target_modules, *(lora.target_modules for lora in config.loras)):
        if is_target("lm_head", targets):
            shown = targets if isinstance(targets, str) else list(targets)
            raise UserError(
                f"lora.target_modules: {shown} with {backend}, which serves no adapter on the "
                "language-model head; leave lm_head out, or set generation.backend=builtin"
            )


def check_addresses(
    generation: GenerationConfig, models: Sequence[str], roles: Sequence[str]
) -> None:
    """Raise UserError for invalid addresses or an invalid ``vllm_command``. ``models``: the model
    of each policy."""
    if generation.backend != "vllm":
        return
    command = generation.vllm_command
    if command is not None:
        names = PLACEHOLDER.findall(command)
        for name in names:
            if name not in PLACEHOLDERS:
                raise UserError(
                    f"generation.vllm_command: {{{name}}} is no placeholder; there are "
                    + ", ".join(f"{{{placeholder}}}" for placeholder in PLACEHOLDERS)
                )
        if "port" not in names:
            raise UserError(
                f"generation.vllm_command: '{command}' without {{port}}; add e.g. --port {{port}}"
            )
        if generation.vllm_url is None:
            return
    for url in itertools.chain(*urls(generation.vllm_url, models, roles)):
        if command is not None and urlsplit(url).port is None:
            raise UserError(
                f"{KEY}: '{url}' contains no port for generation.vllm_command; use e.g. "
                "http://localhost:8000"
            )


def served(config: Config, roles: Sequence[str], run_dir: Path, opened: ExitStack) -> Config:
    """Start the servers of ``generation.vllm_command``, if set, and wait until they respond;
    ``opened`` stops them. Return the configuration with their addresses. Raises UserError. A
    collective call."""
    generation, models = config.generation, config.model_names
    command, url = generation.vllm_command, generation.vllm_url
    if command is None or generation.backend != "vllm":
        return config
    from comlrl.processes import distributed
    from comlrl.rollout.vllm.processes import ServerProcess, free_port

    if url is None and distributed.world_size() > distributed.local_world_size():
        raise UserError(
            f"{KEY}: null with generation.vllm_command and processes on several machines; set an "
            "address that all of them reach"
        )

    def start() -> Any:
        value = url or {m: f"http://127.0.0.1:{free_port()}" for m in dict.fromkeys(models)}
        model_of: dict[str, str] = {}
        for model, group in zip(models, urls(value, models, roles), strict=True):
            model_of |= dict.fromkeys(group, str(MODELS.get(model, model)))
        started = []
        for number, (address, model) in enumerate(model_of.items()):
            port, device = str(urlsplit(address).port), _device(config.agent_devices, number)
            filled = _filled(command, {"model": model, "port": port, "device": device})
            log = run_dir / f"vllm_server_{number}.log"
            started.append(ServerProcess(filled, address, log))
            opened.callback(started[-1].stop)
        logs = ", ".join(str(server.log) for server in started)
        notice(f"generation.vllm_command: waiting until servers answer; they write to {logs}")
        for server in started:
            server.wait()
        return value

    addresses = distributed.from_main(start)
    return replace(config, generation=replace(generation, vllm_url=addresses))


def _filled(command: str, values: Mapping[str, str]) -> str:
    """Fill in a command's placeholders with values quoted for the shell."""

    def quoted(placeholder: re.Match[str]) -> str:
        return shlex.quote(values[placeholder[1]])

    return PLACEHOLDER.sub(quoted, command)


def _device(agent_devices: Sequence[str] | None, number: int) -> str:
    """Return a server's GPU as named in CUDA_VISIBLE_DEVICES, "" without GPUs. GPUs that do not
    train are assigned first, then the others from the first one on."""
    import torch

    from comlrl.processes import distributed

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    training = len(set(agent_devices or ())) or distributed.local_world_size()
    return visible.split(",")[(training + number) % count] if count else ""


def check(config: Config, roles: Sequence[str]) -> None:
    """Raise UserError if a server of the vllm backend does not respond, has too short a context or
    another agent's model, or does not return the tokens left by truncation."""
    if config.generation.backend != "vllm":
        return
    drawn, least = sampling(config, roles), config.agent_model.max_length
    for index, joined in enumerate(servers(config.generation, config.model_names, roles)):
        model, drawn_by = config.model_names[index], drawn.for_agent(index)
        for server in joined.members:
            base, length = server.check()
            if base != model and base in config.model_names:
                raise UserError(
                    f"{KEY}: '{server.url}' serves '{base}', and is listed for '{model}'; list "
                    "separate servers for each model"
                )
            if length is not None and length < least:
                raise UserError(
                    f"{KEY}: '{server.url}' holds {length} tokens of prompt and completion, and "
                    f"agent_model.max_length is {least}; start it with --max-model-len {least}, or "
                    "lower the latter"
                )
            if PurePath(base).name != PurePath(str(MODELS.get(model, model))).name:
                notice(
                    f"{KEY}: '{server.url}' serves '{base}', and '{model}' is trained; if they "
                    "differ, importance/ratio_max is far above 1"
                )
            if drawn_by.truncates or drawn_by.temperature != 1:
                _check_logprobs(server, base, drawn_by)


def _check_logprobs(server: Server, base: str, drawn: Sampling) -> None:
    """Raise UserError if the server's log-probabilities do not suffice to train the policy."""
    try:
        server.check_logprobs(base, support=drawn.truncates)
    except UserError as error:
        if not drawn.truncates:
            raise UserError(f"{KEY}: {error}") from error
        key, value = ("top_p", drawn.top_p) if drawn.top_k is None else ("top_k", drawn.top_k)
        raise UserError(
            f"{key}: {value:g} with generation.backend=vllm, and {error}, or set {key}=null or "
            "generation.backend=builtin"
        ) from error


def overlapped(
    rollout: Rollout | ProgramRollout,
    server: VLLMSampler | None,
    corrected: ImportanceWeightedSampler | None,
    work: Work,
    fallbacks: Fallbacks | None,
) -> OverlappedRollout:
    """Wrap the rollout so that it can grow the next trees while models are updated."""
    from comlrl.rollout.grow import Rollout
    from comlrl.rollout.overlap import OverlappedRollout

    assert isinstance(rollout, Rollout), "check_program refuses others"
    assert server is not None and corrected is not None
    if fallbacks is None:
        return OverlappedRollout(rollout, server, rollout.transition, corrected.weigh)
    ahead = type(fallbacks)()  # fallbacks of the step grown ahead, until it is logged
    transition = work.mode.build(work.prompts, ahead)

    def taken(used: bool) -> None:
        fallbacks.count += ahead.count if used else 0
        ahead.count = 0

    return OverlappedRollout(rollout, server, transition, corrected.weigh, taken)


def prefetch(rollout: OverlappedRollout) -> Callable[[Step | None], None]:
    """Return a function that starts growing the next step's trees; None releases the rollout."""

    def begin(step: Step | None) -> None:
        if step is None:
            rollout.release()
        else:
            rollout.begin(step.deal.shard(step.tasks), step.key)

    return begin


def servers(
    generation: GenerationConfig,
    models: Sequence[str],
    roles: Sequence[str],
    ending: Callable[[], bool] = lambda: False,
) -> tuple[Servers, ...]:
    """Return the servers of each policy; policies with the same servers share one object."""
    from comlrl.rollout.vllm.servers import Servers

    urls_N = urls(generation.vllm_url, models, roles)
    patience = generation.vllm_patience
    made = {group: Servers(group, patience, ending=ending) for group in dict.fromkeys(urls_N)}
    return tuple(made[group] for group in urls_N)


def urls(value: Any, models: Sequence[str], roles: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the server addresses of each policy, in the order of policies.

    ``value``: the key's value; ``models``: the model of each policy; ``roles``: the agents' roles.
    Raises UserError for an invalid address, a policy without a server, and a server of two models.
    """
    if not isinstance(value, Mapping):
        urls_N = [_addresses(KEY, value)] * len(models)
    else:
        roles = roles if len(roles) == len(models) else ()  # a shared policy has no role
        names = dict.fromkeys([*roles, *models])
        for name in value:
            if name not in names:
                raise UserError(
                    f"{KEY}: '{name}' is not an agent's role or model; there are "
                    + ", ".join(f"'{name}'" for name in names)
                )
        urls_N = []
        for index, model in enumerate(models):
            named = [name for name in (*roles[index : index + 1], model) if name in value]
            if not named:
                raise UserError(f"{KEY}: no server for '{model}'; add {{{model}: URL}}")
            urls_N.append(_addresses(f"{KEY}.{named[0]}", value[named[0]]))
    model_of: dict[str, str] = {}
    for model, group in zip(models, urls_N, strict=True):
        for url in group:
            if model_of.setdefault(url, model) != model:
                raise UserError(
                    f"{KEY}: '{url}' is for '{model_of[url]}' and '{model}', and a server holds "
                    "one model; list one for each: {MODEL: URL, MODEL: URL}"
                )
    return tuple(urls_N)


def _is_address(url: Any) -> bool:
    try:
        return url.startswith(("http://", "https://")) and urlsplit(url).port != 0
    except (AttributeError, ValueError):  # not a string; an invalid host or port
        return False


def _addresses(key: str, value: Any) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    if value is None or not listed:
        raise UserError(
            f"{key}: {'null' if value is None else value} with generation.backend=vllm; set the "
            "server's address, or a list of several"
        )
    for url in listed:
        if not _is_address(url):
            raise UserError(f"{key}: {url!r} is not an address; use e.g. http://localhost:8000")
    plain = tuple(url.rstrip("/").removesuffix("/v1") for url in listed)
    for url in plain:
        if plain.count(url) > 1:
            raise UserError(f"{key}: '{url}' appears twice; list each server once")
    return plain
