"""The agents: LoRA adapters on one frozen base held once, or separate models.

PEFT keeps one active adapter a model, so a whole phase (a generation call, a backward pass) runs
inside ``Team.acting(agent)`` or ``Team.reference(agent)``; nothing switches sample by sample.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from comlrl import distributed
from comlrl.builtin import TINY_CODER
from comlrl.config import AgentModelConfig, Config, ConfigError
from comlrl.lean import LeanDecoder, lean_decoder
from comlrl.lora import Router, make_lean
from comlrl.prompts import plain_text
from comlrl.sharding import like, stored
from comlrl.types import Message

START = "reference"  # adapters that are what a run started from; also in checkpoints
BUILTIN_MODELS = {"builtin:tiny-coder": TINY_CODER}


@dataclass(eq=False)
class Agent:
    """One agent's view of its model."""

    index: int
    model: PreTrainedModel  # the causal language model, LoRA layers inside where it has them
    tokenizer: Any
    peft: PeftModel | None  # the same model as PEFT wraps it, shared by homogeneous agents
    router: Router | None = None  # of the model's LoRA layers, where they are lean
    lean: LeanDecoder | None = None  # the model's decoder, where it has a fast way through it
    start: Agent | None = None  # frozen copy: the reference policy where all weights are trained
    start_adapter: str | None = None  # frozen: the reference policy's; None: it is the base alone
    micro_batch_tokens: int | None = None  # of its update, once memory has run out

    @property
    def adapter(self) -> str:
        return f"agent_{self.index}"

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion; the first is the tokenizer's own."""
        config = self.model.generation_config
        listed = config.eos_token_id if config is not None else None
        more = listed if isinstance(listed, list) else [] if listed is None else [listed]
        return tuple(dict.fromkeys([self.tokenizer.eos_token_id, *more]))

    @property
    def context_length(self) -> int:
        """Positions that the model was made for."""
        return int(getattr(self.model.config, "max_position_embeddings", 1 << 30))

    def encode(self, prompt: Sequence[Message]) -> list[int]:
        """Token ids of a prompt: the chat template where there is one, else plain text."""
        if getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": m.role, "content": m.content} for m in prompt]
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.tokenizer(plain_text(prompt))["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def hidden(self, **inputs: Any) -> torch.Tensor:
        """Last hidden states, shape (rows, tokens, width)."""
        return self.model.get_decoder()(**inputs).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states, with the scalings that some architectures put behind."""
        head = self.model.get_output_embeddings()
        config = self.model.config
        logits = head(hidden.to(head.weight.dtype))
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """For passes that are differentiated: activation checkpointing and LoRA dropout are on.

        All else stays in evaluation mode, as does everything while sampling and scoring.
        """
        switches = self.switches
        for module in switches:
            module.training = True
        try:
            yield
        finally:
            for module in switches:
                module.training = False

    @property
    def switches(self) -> list[torch.nn.Module]:
        """Modules that learning treats otherwise: with checkpointing, or LoRA dropout above 0."""
        found = [m for m in self.model.modules() if getattr(m, "gradient_checkpointing", False)]
        dropouts = [d for layer in _lora_layers(self.model) for d in layer.lora_dropout.values()]
        return found + [d for d in dropouts if isinstance(d, torch.nn.Dropout)]

    def parameters(self) -> list[torch.nn.Parameter]:
        """The weights that this agent trains: its adapter's, or all of its model's."""
        if self.peft is None:
            return list(self.model.parameters())
        marker = f".{self.adapter}."
        return [p for n, p in self.peft.named_parameters() if "lora_" in n and marker in n]


class Team:
    """N agents, helpers first and main last."""

    def __init__(
        self,
        agents: Sequence[Agent],
        *,
        shared_base: bool,
        full: bool,
        begun_elsewhere: bool = False,
    ) -> None:
        self.agents = tuple(agents)
        self.shared_base = shared_base  # one model, an adapter for each agent
        self.full = full  # every weight is trained, no adapters
        # The reference is not the models as they are named (``init_from``): checkpoints hold it.
        self.begun_elsewhere = begun_elsewhere
        self.sharded = False  # layers are split over the processes (comlrl/sharding.py)

    def __len__(self) -> int:
        return len(self.agents)

    @property
    def device(self) -> torch.device:
        """Where the first agent is."""
        return self.agents[0].device

    @property
    def router(self) -> Router | None:
        """Of the base that all agents share, where its layers are lean."""
        return self.agents[0].router if self.shared_base else None

    @property
    def side_by_side(self) -> bool:
        """Whether agents may be updated at once, each in its own thread."""
        switched = any(agent.switches for agent in self.agents)  # of a model, not of a thread
        apart = self.router is not None or not self.shared_base
        return apart and not switched and not self.sharded

    @contextlib.contextmanager
    def acting(self, index: int) -> Iterator[Agent]:
        """The agent with its own adapter active, for generation and for its update.

        With a router this holds for the calling thread alone.
        """
        agent = self.agents[index]
        if agent.router is not None:
            with agent.router.only(agent.adapter):
                yield agent
            return
        if agent.peft is not None and agent.peft.active_adapter != agent.adapter:
            agent.peft.set_adapter(agent.adapter)
            self._train_all_adapters(agent.peft)
        yield agent

    @contextlib.contextmanager
    def reference(self, index: int) -> Iterator[Agent]:
        """The reference policy, which is what the run started from: the base with the adapter off,
        or with the frozen first adapter, or the frozen first copy."""
        agent = self.agents[index]
        if agent.router is not None:
            with agent.router.only(agent.start_adapter):
                yield agent
            return
        if agent.peft is not None:
            with _through(_lora_layers(agent.model), agent.start_adapter):
                yield agent
            return
        if agent.start is None:
            raise RuntimeError("no reference policy was kept; build the team with reference=True")
        yield agent.start

    def save(self, folder: Path) -> None:
        """Write ``folder/agent_N/`` in PEFT's format, or transformers' for whole models.

        Called by all processes; the main one writes.
        """
        for agent in self.agents:
            target = folder / agent.adapter
            model = agent.model if agent.peft is None else agent.peft
            weights = None
            if self.sharded:  # put together by all, written by one
                weights = {
                    name: stored(tensor)
                    for name, tensor in model.state_dict().items()
                    if agent.peft is None or "lora_" in name
                }
            if not distributed.is_main():
                continue
            if agent.peft is None:
                agent.model.save_pretrained(target, state_dict=weights)
            else:
                agent.peft.save_pretrained(
                    str(folder),
                    selected_adapters=[agent.adapter],
                    state_dict=weights,
                    save_embedding_layers=False,  # they are the base's; "auto" asks a hub for them
                )
            agent.tokenizer.save_pretrained(target)

    def state_tensors(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """The trained weights of each agent, as a checkpoint holds them, and the reference's where
        they cannot be had otherwise."""
        parts = {agent.adapter: self._named(agent) for agent in self.agents}
        parts |= {_reference(agent): self._named_start(agent) for agent in self._started}
        return {
            part: {name: stored(weight) for name, weight in named.items()}
            for part, named in parts.items()
        }

    def load_tensors(self, tensors: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Take weights as ``state_tensors`` has them. Raises ConfigError where they do not fit."""
        for agent in self.agents:
            self._take(agent, tensors[agent.adapter])
        for agent in self._started:
            self._take_start(agent, tensors[_reference(agent)])

    def begin_with(self, tensors: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Start from ``agent_N`` → its weights; they are the reference too."""
        for agent in self.agents:
            self._take(agent, tensors[agent.adapter])
        for agent in self._started:
            self._take_start(agent, tensors[agent.adapter])

    @property
    def _started(self) -> list[Agent]:
        """Agents whose reference was given to them."""
        held = [a for a in self.agents if a.start is not None or a.start_adapter is not None]
        return held if self.begun_elsewhere else []

    def _take(self, agent: Agent, weights: Mapping[str, torch.Tensor]) -> None:
        _copy(self._named(agent), weights, agent.adapter, exactly=agent.peft is not None)

    def _take_start(self, agent: Agent, weights: Mapping[str, torch.Tensor]) -> None:
        _copy(self._named_start(agent), weights, agent.adapter, exactly=agent.peft is not None)
        if agent.start is not None and agent.start.lean is not None:  # it holds copies of biases
            agent.start.lean = lean_decoder(agent.start.model, None, 0)

    def _named_start(self, agent: Agent) -> dict[str, torch.nn.Parameter]:
        if agent.start is not None:
            return dict(agent.start.model.named_parameters())
        return self._named(agent, agent.start_adapter)

    def _named(self, agent: Agent, adapter: str | None = None) -> dict[str, torch.nn.Parameter]:
        if agent.peft is None:
            return dict(agent.model.named_parameters())
        marker = f".{adapter or agent.adapter}."
        return {
            name.replace(marker, "."): parameter
            for name, parameter in agent.peft.named_parameters()
            if "lora_" in name and marker in name
        }

    def _train_all_adapters(self, peft: PeftModel) -> None:
        # set_adapter freezes the others; every agent's gradients are wanted in one step.
        for agent in self.agents:
            if agent.peft is peft:
                for parameter in agent.parameters():
                    parameter.requires_grad_(True)


def _reference(agent: Agent) -> str:
    """What a checkpoint calls the weights that an agent started from."""
    return f"{START}_{agent.index}"


def _copy(
    own: Mapping[str, torch.nn.Parameter],
    weights: Mapping[str, torch.Tensor],
    source: str,
    *,
    exactly: bool,
) -> None:
    """``exactly``: weights for which there is no place are refused too."""
    wrong = set(own) ^ set(weights) if exactly else set(own) - set(weights)
    wrong |= {n for n in set(own) & set(weights) if own[n].shape != weights[n].shape}
    if wrong:
        raise ConfigError(f"{source}: holds other weights than this team, e.g. {min(wrong)}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(like(weights[name], parameter))


def build_team(config: Config, *, reference: bool = False, device: str | None = None) -> Team:
    """Load the models. ``reference``: keep a frozen copy of what the run starts from, where that
    is not the base with the adapter off.

    SHPPO's team is one policy, whatever the number of agents that act by it. Raises ConfigError
    where a model cannot be had.
    """
    count = 1 if config.algorithm == "shppo" else config.section.num_agents
    device = device or default_device()
    elsewhere = config.init_from is not None
    torch.manual_seed(config.seed)  # LoRA's A matrices are drawn at random
    if config.agents is not None or not config.lora.enabled:
        agents = [_alone(config, i, count, device, reference) for i in range(count)]
        full = not config.lora.enabled
        return Team(agents, shared_base=False, full=full, begun_elsewhere=elsewhere)
    name, indices = config.agent_model.name, range(count)
    model, tokenizer = load_model(config.agent_model, name, device, frozen=True)
    peft, starts = _with_adapters(model, name, config, indices, reference)
    router = make_lean(model)
    lean = lean_decoder(model, router, count, _learns_lean(config))
    agents = [
        Agent(i, model, tokenizer, peft, router, lean, start_adapter=starts[i]) for i in indices
    ]
    return Team(agents, shared_base=True, full=False, begun_elsewhere=elsewhere)


def _alone(config: Config, index: int, count: int, device: str, reference: bool) -> Agent:
    """An agent with a model of its own."""
    name = config.agents[index] if config.agents else config.agent_model.name
    place = config.agent_devices[index] if config.agent_devices else device
    lora = config.lora.enabled
    model, tokenizer = load_model(config.agent_model, name, place, frozen=lora)
    peft, router, start, start_adapter = None, None, None, None
    if lora:
        peft, (start_adapter,) = _with_adapters(model, name, config, [index], reference)
        router = make_lean(model)
    elif reference:
        kept = copy.deepcopy(model).requires_grad_(False)
        start = Agent(index, kept, tokenizer, None, lean=lean_decoder(kept, None, 0))
    lean = lean_decoder(model, router, int(lora), _learns_lean(config))
    return Agent(index, model, tokenizer, peft, router, lean, start, start_adapter)


def _learns_lean(config: Config) -> bool:
    """Checkpointing and dropout are left to the modules that have them."""
    return not config.agent_model.gradient_checkpointing and not config.lora.dropout


def default_device() -> str:
    if torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return "cpu"


def resolve_model(name: str) -> str:
    """A builtin's folder, or the name as it was given."""
    if name.startswith("builtin:") and name not in BUILTIN_MODELS:
        raise ConfigError(f"agent_model.name: '{name}'; the builtin is 'builtin:tiny-coder'")
    return str(BUILTIN_MODELS.get(name, name))


def load_model(
    section: AgentModelConfig, name: str, device: str, *, frozen: bool = False
) -> tuple[PreTrainedModel, Any]:
    """A causal language model in evaluation mode, and its tokenizer with pad and EOS tokens."""
    source = resolve_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **dict(section.tokenizer_kwargs))
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=_dtype(section, device, frozen),
            attn_implementation=section.attn_implementation,
            **dict(section.model_kwargs),
        )
    except (OSError, ValueError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"agent_model.name: '{name}' cannot be loaded: {reason}") from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"agent_model.name: '{name}' holds an adapter, which needs its base; give the base "
            "there, and the adapter's folder as init_from"
        )
    if section.special_tokens and tokenizer.add_special_tokens(dict(section.special_tokens)):
        model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size))
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"agent_model.special_tokens: the tokenizer of '{name}' has no EOS token; "
            "give eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so that any token will do
    if "device_map" not in section.model_kwargs:
        model.to(device)  # type: ignore[arg-type]
        if device == "cpu":
            _leave_file(model)
    model.eval()  # dropout in a policy would make sampling and scoring disagree
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model, tokenizer


def _dtype(section: AgentModelConfig, device: str, frozen: bool) -> torch.dtype:
    if section.torch_dtype != "auto":
        return getattr(torch, section.torch_dtype)
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # Weights that are trained need float32's small steps; a frozen base does not. Products of
    # bfloat16 by AVX-512 are slower than those of float32 (150 against 255 GFLOP/s on two cores).
    fast = torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast and frozen else torch.float32


def _with_adapters(
    model: PreTrainedModel, name: str, config: Config, indices: Sequence[int], reference: bool
) -> tuple[PeftModel, list[str | None]]:
    """The model with an adapter for each of these agents; and each one's frozen one, for what it
    starts from (``init_from``), where a reference is needed that is not the base."""
    section = config.lora
    settings = LoraConfig(
        r=section.r,
        lora_alpha=2 * section.r if section.alpha is None else section.alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=_modules(section.target_modules),
        task_type="CAUSAL_LM",
    )
    starts = [f"{START}_{i}" for i in indices if reference and config.init_from is not None]
    try:
        peft = get_peft_model(model, settings, adapter_name=f"agent_{indices[0]}")
        for index in indices[1:]:
            peft.add_adapter(f"agent_{index}", settings)
        for start in starts:
            frozen = copy.copy(settings)
            frozen.lora_dropout = 0.0
            peft.add_adapter(start, frozen)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"lora.target_modules: {section.target_modules!r} does not fit the model: {reason}"
        ) from error
    for each in peft.peft_config.values():
        each.base_model_name_or_path = name  # as the user gave it, not where it was found
    for key, parameter in peft.named_parameters():
        parameter.requires_grad_("lora_" in key and f".{START}_" not in key)
    peft.eval()
    return peft, list(starts) or [None] * len(indices)


def _modules(value: Any) -> Any:
    return value if isinstance(value, str) else list(value)


def _lora_layers(model: PreTrainedModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@contextlib.contextmanager
def _through(layers: Sequence[LoraLayer], adapter: str | None) -> Iterator[None]:
    """All rows go through this adapter; None: through none."""
    # PEFT's own ways of saying so re-freeze the other adapters.
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._disable_adapters = adapter is None
        if adapter is not None:
            layer._active_adapter = [adapter]
    try:
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = False, active


def _leave_file(model: PreTrainedModel) -> None:
    """Copy weights that are views of a mapped file. What replaces some of them later (fused layers)
    would stand in memory beside the whole file, as long as one weight is left there."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def parameter_count(name: str) -> int | None:
    """Parameters of a model from its configuration alone; None where that is not at hand."""
    folder = Path(resolve_model(name))
    if not (folder / "config.json").exists():
        return None
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())
