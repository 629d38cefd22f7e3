"""Loading of a team by model names: bases, adapters, tokenizers, precision."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Embedding as AdaptedEmbedding
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from comlrl.builtin import MODELS
from comlrl.config.resolved import Config
from comlrl.config.sections import AgentConfig, AgentModelConfig, LoraSection
from comlrl.errors import UserError
from comlrl.models.agent import REFERENCE, Agent
from comlrl.models.fast.decoder import fast_decoder
from comlrl.models.fast.lora_routing import add_router
from comlrl.models.prompt_encoder import PromptEncoder, end_ids
from comlrl.models.team import Team
from comlrl.quoting import one_line

# Defaults that the configuration may override: code from a model's repository is not run, without
# a question on the terminal, and pickled weights may contain only tensors.
transformers_logging.disable_progress_bar()  # one for each model read or written
TOKENIZER_SAFETY: Mapping[str, Any] = {"trust_remote_code": False}
MODEL_SAFETY: Mapping[str, Any] = {"trust_remote_code": False, "weights_only": True}
MODEL_KEY = "agent_model.name"  # the setting that errors name


def build_team(config: Config, *, reference: bool = False, device: str | None = None) -> Team:
    """Load the agents' models.

    ``reference``: keep a frozen copy of the initial weights, unless they are the base with the
    adapter off. Agents that share one policy form a team of one. Raises UserError if a model cannot
    be loaded.
    """
    if config.agent_model.chat is True:
        for name in dict.fromkeys(config.agent_models):
            load_encoder(config.agent_model, name)  # raises UserError without a chat template
    count = config.section.policies
    torch.manual_seed(config.seed)  # LoRA's A matrices are drawn at random
    return load_team(
        config.agent_model,
        config.loras[:count],
        config.model_names[:count],
        shares_base=config.shares_base,
        devices=(config.agent_devices or (device or default_device(),) * count)[:count],
        reference=reference,
        begun_elsewhere=config.init_from is not None,
        settings=config.team,
        sharded=config.distributed.strategy == "fsdp",
    )


def load_team(
    section: AgentModelConfig,
    loras: Sequence[LoraSection],
    models: Sequence[str],
    *,
    shares_base: bool,
    devices: Sequence[str],
    reference: bool = False,
    begun_elsewhere: bool = False,
    settings: Sequence[AgentConfig] = (),
    sharded: bool = False,
    key: str = MODEL_KEY,
) -> Team:
    """Load one agent per model name: adapters of the first model, or separate models.

    Args:
        loras: settings of each agent's adapter; all equal if the agents share a base.
        shares_base: whether the agents are adapters of one model.
        reference: as for ``build_team``.
        begun_elsewhere: whether initial weights will be loaded from elsewhere (``init_from``).
        settings: individual settings of each agent; empty: the defaults.
        sharded: whether ``Team.split`` follows. Such models have no fast decoder, which would
            replace their weights by views that cannot be split.
        key: the setting that errors name.
    """
    agents: list[Agent] = []
    settings = settings or [AgentConfig()] * len(models)
    untrained = [i for i, agent in enumerate(settings) if not agent.train]
    indices_M = [range(len(models))] if shares_base else [[i] for i in range(len(models))]
    for indices in indices_M:
        name, device, lora = models[indices[0]], devices[indices[0]], loras[indices[0]]
        model, tokenizer = load_model(section, name, device, key)
        peft, router, start = None, None, None
        copies: list[str | None] = [None] * len(indices)
        if lora.enabled:
            copied = reference and begun_elsewhere
            peft, copies = _with_adapters(model, name, lora, indices, copied, untrained)
            router = add_router(model)
            if router is not None and section.gradient_checkpointing:
                checkpoint_activations(model, context_fn=router.checkpoint_contexts)
        elif reference and indices[0] not in untrained:
            frozen = copy.deepcopy(model).requires_grad_(False)
            start = Agent(
                index=indices[0],
                model=frozen,
                tokenizer=tokenizer,
                peft=None,
                fast=fast_decoder(frozen, None),
            )
        adapters = [f"agent_{i}" for i in indices] if lora.enabled else []
        fast = None
        if not sharded:
            fast = fast_decoder(model, router, adapters, learning=not lora.dropout)
        if fast is not None:
            fast.tree = section.update_attention != "grids"
            fast.checkpointing = section.gradient_checkpointing
            compilable = fast.learning and not (fast.quantized or fast.checkpointing)
            fast.compiled = compilable and section.update_attention == "compiled"
        for index, start_adapter in zip(indices, copies, strict=True):
            agent = Agent(
                index=index,
                model=model,
                tokenizer=tokenizer,
                peft=peft,
                router=router,
                fast=fast,
                start=start,
                start_adapter=start_adapter,
                chat=section.chat,
                template_arguments={
                    **section.template_arguments,
                    **settings[index].template_arguments,
                },
                trained=settings[index].train,
                learning_rate=settings[index].learning_rate,
            )
            agents.append(agent)
    return Team(agents, shared_base=shares_base, begun_elsewhere=begun_elsewhere)


def default_device() -> str:
    if torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return "cpu"


def resolve_model(name: str, key: str = MODEL_KEY) -> str:
    """Return the folder of a builtin model, or any other name unchanged.

    Raises UserError for an unknown builtin and for a GGUF file.
    """
    if name.endswith(".gguf"):
        raise UserError(
            f"{key}: '{name}' is a GGUF file, which is no longer supported; use a model's folder "
            "(transformers converts it: from_pretrained(gguf_file=…), save_pretrained)"
        )
    if name.startswith("builtin:") and name not in MODELS:
        raise UserError(f"{key}: '{name}'; the builtin are {', '.join(MODELS)}")
    return str(MODELS.get(name, name))


def load_tokenizer(section: AgentModelConfig, name: str, key: str = MODEL_KEY) -> Any:
    """Load a model's tokenizer, with its special tokens. Raises UserError if unavailable."""
    try:
        settings = {**TOKENIZER_SAFETY, **section.tokenizer_kwargs}
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(name, key), **settings)
    except Exception as error:  # hub and file readers raise many kinds
        reason = load_failure(error)
        raise UserError(f"{key}: '{name}' cannot be loaded: {reason}") from error
    tokenizer.add_special_tokens(dict(section.special_tokens))
    return tokenizer


def load_encoder(section: AgentModelConfig, name: str, key: str = MODEL_KEY) -> PromptEncoder:
    """Load a model's prompt encoder, without weights. Raises UserError if unavailable."""
    tokenizer = load_tokenizer(section, name, key)
    trusted = bool(section.model_kwargs.get("trust_remote_code", False))
    try:
        ends = end_ids(generation_config(resolve_model(name, key), trusted))
    except Exception as error:  # hub and file readers raise many kinds
        reason = load_failure(error)
        raise UserError(f"{key}: '{name}' cannot be loaded: {reason}") from error
    return PromptEncoder(tokenizer, section.chat, ends, section.template_arguments)


def generation_config(source: str | Path, trusted: bool) -> Any:
    """Return a model's generation config, or its config if it has none."""
    with contextlib.suppress(OSError):
        return GenerationConfig.from_pretrained(source)
    return AutoConfig.from_pretrained(source, trust_remote_code=trusted)


def load_model(
    section: AgentModelConfig, name: str, device: str, key: str = MODEL_KEY
) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model in evaluation mode, and its tokenizer with pad and EOS tokens.

    Raises UserError if either cannot be loaded or used.
    """
    source, attention = resolve_model(name, key), section.attn_implementation
    tokenizer = load_tokenizer(section, name, key)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype_of(section, device),
            attn_implementation=None if attention == "auto" else attention,
            **{**MODEL_SAFETY, **section.model_kwargs},
        )
    except Exception as error:  # hub and file readers raise many kinds
        reason = load_failure(error)
        if attention != "auto" and not _attends(section, source, attention):
            raise UserError(
                f"agent_model.attn_implementation: '{name}' is not supported by '{attention}'; use "
                "auto"
            ) from error
        raise UserError(f"{key}: '{name}' cannot be loaded: {reason}") from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(
            f"{key}: '{name}' holds an adapter, which needs its base; set the base there, and "
            "init_from to the adapter's folder"
        )
    if section.special_tokens and len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"agent_model.special_tokens: the tokenizer of '{name}' has no EOS token; set eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so that any token will do
    if "device_map" not in section.model_kwargs:
        model.to(device)  # type: ignore[arg-type]
        if device == "cpu":
            # Copy views of the mapped file, which stays in memory as long as any view is left.
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
    model.eval()  # dropout in a policy would make sampling and scoring disagree
    if section.gradient_checkpointing:
        checkpoint_activations(model)
        model.enable_input_require_grads()
    return model, tokenizer


def checkpoint_activations(model: Any, **options: Any) -> None:
    """Recompute activations of layers in the backward pass instead of storing them."""
    # transformers renamed the method in 5.23
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    enable = getattr(model, new, None) or getattr(model, old)
    enable({"use_reentrant": False, **options})


def _attends(section: AgentModelConfig, source: str, attention: str) -> bool:
    """Return whether a model that failed to load supports an attention implementation."""
    trusted = bool(section.model_kwargs.get("trust_remote_code", False))
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
    except Exception:  # attention is not the reason
        return True
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, trust_remote_code=trusted
            )
    except (ImportError, ValueError):
        return False
    return True


def load_failure(error: Exception) -> str:
    """Return why a model could not be loaded, in one line."""
    if isinstance(error, pickle.UnpicklingError):
        return "its pickled weights hold more than tensors, and are not loaded; use safetensors"
    for_users = isinstance(error, OSError | ValueError)  # libraries' messages for users
    return one_line(str(error) if for_users and str(error) else f"{type(error).__name__}: {error}")


def dtype_of(section: AgentModelConfig, device: str) -> torch.dtype:
    """Return the dtype of a model's weights; trained ones have float32 masters."""
    if section.torch_dtype != "auto":
        return getattr(torch, section.torch_dtype)
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = multiplies_bfloat16_fast(torch.cpu.get_capabilities())
    return torch.bfloat16 if fast else torch.float32


def multiplies_bfloat16_fast(cpu: Mapping[str, Any]) -> bool:
    """Return whether a CPU's products are faster in bfloat16 than in float32.

    With AMX they are. With AVX-512 alone they are on AMD CPUs (2 to 5 times), but not on Intel's
    (150 against 255 GFLOP/s on two cores). This rule is fixed, not measured at the start, so that
    repeated, resumed and distributed runs compute in the same precision. ``cpu``: the result of
    ``torch.cpu.get_capabilities()``.
    """
    by_avx = cpu.get("avx512_bf16", False) and str(cpu.get("cpu_name")).startswith("AMD")
    return bool(cpu.get("amx_bf16", False) or by_avx)


def _with_adapters(
    model: PreTrainedModel,
    name: str,
    section: LoraSection,
    indices: Sequence[int],
    copies: bool,
    untrained: Sequence[int],
) -> tuple[PeftModel, list[str | None]]:
    """Add an adapter for each agent; also return the name of each agent's reference adapter.

    ``copies``: whether references are frozen copies of the initial adapters (``init_from``); if
    not, the reference is the base (None). ``untrained``: agents that are their own reference.
    """
    modules = section.target_modules
    settings = LoraConfig(
        r=section.r,
        lora_alpha=section.effective_alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
    starts = [f"{REFERENCE}_{i}" if copies and i not in untrained else None for i in indices]
    try:
        peft = get_peft_model(model, settings, adapter_name=f"agent_{indices[0]}")
        for index in indices[1:]:
            peft.add_adapter(f"agent_{index}", settings)
        for start in filter(None, starts):
            frozen = copy.copy(settings)
            frozen.lora_dropout = 0.0
            peft.add_adapter(start, frozen)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"lora.target_modules: {section.target_modules!r} does not fit the model: {reason}"
        ) from error
    if any(isinstance(module, AdaptedEmbedding) for module in peft.modules()):
        raise UserError(
            f"lora.target_modules: {section.target_modules!r} names an embedding, which gets no "
            "trained adapter; leave it out"
        )
    for each in peft.peft_config.values():
        each.base_model_name_or_path = name  # as the user gave it, not where it was found
    for key, parameter in peft.named_parameters():
        parameter.requires_grad_("lora_" in key and f".{REFERENCE}_" not in key)
    peft.eval()
    return peft, starts
