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
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from comlrl import distributed
from comlrl.builtin import TINY_CODER
from comlrl.config import AgentModelConfig, Config, ConfigError, LoraSection
from comlrl.lean import LeanDecoder, lean_decoder
from comlrl.lora import Router, make_lean
from comlrl.prompts import plain_text
from comlrl.sharding import like, stored
from comlrl.types import Message

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
    ) -> None:
        self.agents = tuple(agents)
        self.shared_base = shared_base  # one model, an adapter for each agent
        self.full = full  # every weight is trained, no adapters
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
        """The reference policy: the base with the adapter off, or the frozen first copy."""
        agent = self.agents[index]
        if agent.router is not None:
            with agent.router.only(None):
                yield agent
            return
        if agent.peft is not None:
            layers = _lora_layers(agent.model)
            with _adapters_off(layers):
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
                    str(folder), selected_adapters=[agent.adapter], state_dict=weights
                )
            agent.tokenizer.save_pretrained(target)

    def load(self, folder: Path) -> None:
        """Take the weights of ``save``, in place. Raises ConfigError where they do not fit."""
        for agent in self.agents:
            file = folder / agent.adapter
            file /= "adapter_model.safetensors" if agent.peft is not None else "model.safetensors"
            if not file.exists():
                raise ConfigError(f"{folder}: holds no {file.relative_to(folder)}")
            self._take(agent, load_file(str(file)), str(file))

    def state_tensors(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """The trained weights of each agent, as a checkpoint holds them."""
        return {
            agent.adapter: {name: stored(weight) for name, weight in self._named(agent).items()}
            for agent in self.agents
        }

    def load_tensors(self, tensors: Mapping[str, dict[str, torch.Tensor]]) -> None:
        for agent in self.agents:
            self._take(agent, tensors[agent.adapter], agent.adapter)

    def _take(self, agent: Agent, weights: Mapping[str, torch.Tensor], source: str) -> None:
        own = self._named(agent)
        missing = sorted(set(own) - set(weights))
        if missing:
            raise ConfigError(f"{source}: holds other weights than this team; no {missing[0]}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(like(weights[name], parameter))

    def _named(self, agent: Agent) -> dict[str, torch.nn.Parameter]:
        if agent.peft is None:
            return dict(agent.model.named_parameters())
        marker = f".{agent.adapter}."
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


def build_team(config: Config, *, reference: bool = False, device: str | None = None) -> Team:
    """Load the models. ``reference``: keep a frozen copy where all weights are trained.

    SHPPO's team is one policy, whatever the number of agents that act by it. Raises ConfigError
    where a model cannot be had.
    """
    count = 1 if config.algorithm == "shppo" else config.section.num_agents
    device = device or default_device()
    torch.manual_seed(config.seed)  # LoRA's A matrices are drawn at random
    if config.agents is None and config.lora.enabled:
        model, tokenizer = load_model(
            config.agent_model, config.agent_model.name, device, frozen=True
        )
        peft = _with_adapters(model, config.lora, count)
        router = make_lean(model)
        lean = lean_decoder(model, router, count, _learns_lean(config))
        agents = [Agent(i, model, tokenizer, peft, router, lean) for i in range(count)]
        return Team(agents, shared_base=True, full=False)
    names = config.agents or (config.agent_model.name,) * count
    devices = config.agent_devices or (device,) * count
    separate = []
    for index, (name, place) in enumerate(zip(names, devices, strict=True)):
        model, tokenizer = load_model(config.agent_model, name, place, frozen=config.lora.enabled)
        adapters, router, start = None, None, None
        if config.lora.enabled:
            adapters = _with_adapters(model, config.lora, 1, first=index)
            router = make_lean(model)
        elif reference:
            kept = copy.deepcopy(model).requires_grad_(False)
            start = Agent(index, kept, tokenizer, None, lean=lean_decoder(kept, None, 0))
        count, learning = int(config.lora.enabled), _learns_lean(config)
        lean = lean_decoder(model, router, count, learning)
        separate.append(Agent(index, model, tokenizer, adapters, router, lean, start))
    return Team(separate, shared_base=False, full=not config.lora.enabled)


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
    model: PreTrainedModel, section: LoraSection, count: int, first: int = 0
) -> PeftModel:
    settings = LoraConfig(
        r=section.r,
        lora_alpha=2 * section.r if section.alpha is None else section.alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=_modules(section.target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        peft = get_peft_model(model, settings, adapter_name=f"agent_{first}")
        for index in range(first + 1, first + count):
            peft.add_adapter(f"agent_{index}", settings)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"lora.target_modules: {section.target_modules!r} does not fit the model: {reason}"
        ) from error
    for name, parameter in peft.named_parameters():
        parameter.requires_grad_("lora_" in name)
    peft.eval()
    return peft


def _modules(value: Any) -> Any:
    return value if isinstance(value, str) else list(value)


def _lora_layers(model: PreTrainedModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@contextlib.contextmanager
def _adapters_off(layers: Sequence[LoraLayer]) -> Iterator[None]:
    # PEFT's own disable_adapter re-freezes the other adapters when it ends.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


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
