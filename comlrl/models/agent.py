"""One agent's view of its model: encoding, hidden states, logits and trainable parameters."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from comlrl.errors import UserError
from comlrl.models.fast.decoder import FastDecoder, fast_decoder
from comlrl.models.fast.lora_routing import Router
from comlrl.models.prompt_encoder import PromptEncoder, end_ids
from comlrl.types import Message

REFERENCE = "reference"  # prefix of frozen copies of the initial adapters, also in checkpoints


def positions_of(config: Any) -> int:
    """Return the context length from a model's config; 2³⁰ if it has none."""
    return int(getattr(config, "max_position_embeddings", 1 << 30))


@dataclass(eq=False, kw_only=True)
class Agent:
    """One agent's view of its model."""

    index: int
    model: PreTrainedModel  # causal language model, including its LoRA layers if any
    tokenizer: Any
    peft: PeftModel | None  # PEFT's wrapper of the same model, shared by homogeneous agents
    router: Router | None = None  # of the model's LoRA layers, if they are supported
    fast: FastDecoder | None = None  # fast forward pass, for supported architectures
    start: Agent | None = None  # frozen copy: the reference policy if all weights are trained
    start_adapter: str | None = None  # frozen adapter of the reference policy; None: base only
    chat: Literal["auto", True, False] = "auto"  # ``agent_model.chat``
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    trained: bool = True  # False: the agent acts with fixed weights
    learning_rate: float | None = None  # None: that of the algorithm's section
    micro_batch_tokens: int | None = None  # limit in updates, set after running out of memory
    sharded: bool = False  # whether the model's layers are sharded over processes

    def __post_init__(self) -> None:
        if not self.trained:
            for parameter in self.named().values():
                parameter.requires_grad_(False)

    @property
    def adapter(self) -> str:
        return f"agent_{self.index}"

    @property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion; the first is the tokenizer's EOS token."""
        ids = [self.tokenizer.eos_token_id, *self.encoder.ends]
        if self.encoder.chats and self.encoder.end_of_turn is not None:
            ids.append(self.encoder.end_of_turn)
        return tuple(dict.fromkeys(ids))

    @property
    def vocabulary(self) -> int:
        """Size of the model's vocabulary; the tokenizer's may be smaller."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.weight.shape[0])

    @property
    def context_length(self) -> int:
        """Maximum number of positions, from the model's config."""
        return positions_of(self.model.config)

    @cached_property
    def encoder(self) -> PromptEncoder:
        ends = end_ids(getattr(self.model, "generation_config", None))
        return PromptEncoder(self.tokenizer, self.chat, ends, self.template_arguments)

    def encode(self, prompt: Sequence[Message]) -> list[int]:
        """Encode a prompt; see ``PromptEncoder.encode``."""
        return self.encoder.encode(prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def hidden(self, **inputs: Any) -> torch.Tensor:
        """Return the last hidden states, shape (rows, tokens, width)."""
        return self.model.get_decoder()(**inputs).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the language-model head, with the scaling or soft cap of some architectures."""
        head = self.model.get_output_embeddings()
        config = self.model.config
        hidden = hidden.to(head.weight.dtype)
        logits = head(hidden)
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def learning(self) -> contextlib.AbstractContextManager[None]:
        """Enable activation checkpointing and LoRA dropout for passes with gradients.

        All other modules stay in evaluation mode; sampling and scoring use it throughout.
        """
        return modes(self.switches, True)

    @property
    def switches(self) -> list[torch.nn.Module]:
        """Modules that ``learning`` switches: with checkpointing, or with LoRA dropout above 0."""
        checkpointed = [
            m for m in self.model.modules() if getattr(m, "gradient_checkpointing", False)
        ]
        dropouts = [d for layer in lora_layers(self.model) for d in layer.lora_dropout.values()]
        return checkpointed + [d for d in dropouts if isinstance(d, torch.nn.Dropout)]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the trained parameters: the adapter's, the whole model's, or none."""
        return list(self.named().values()) if self.trained else []

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights of the adapter or the whole model, by names that all agents share."""
        return dict(self.named())

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy weights in place. Raises UserError if names or shapes do not match."""
        _copy(self.named(), tensors, self.adapter, exactly=self.peft is not None)

    def named(self, adapter: str | None = None) -> dict[str, torch.nn.Parameter]:
        """Return parameters by name: the whole model's, or an adapter's (None: this agent's).

        Parameter names omit the adapter's name.
        """
        if self.peft is None:
            return dict(self.model.named_parameters())
        marker = f".{adapter or self.adapter}."
        return {
            name.replace(marker, "."): parameter
            for name, parameter in self.peft.named_parameters()
            if "lora_" in name and marker in name
        }


@dataclass(frozen=True)
class Reference:
    """A reference policy other than the base alone: the weights that the agent started from."""

    agent: Agent

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._named())

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy weights in place. Raises UserError if names or shapes do not match."""
        agent = self.agent
        _copy(self._named(), tensors, agent.adapter, exactly=agent.peft is not None)
        if agent.start is not None and agent.start.fast is not None:  # which holds copies of biases
            agent.start.fast = fast_decoder(agent.start.model, None)

    def _named(self) -> dict[str, torch.nn.Parameter]:
        if self.agent.start is not None:
            return dict(self.agent.start.model.named_parameters())
        return self.agent.named(self.agent.start_adapter)


@dataclass(frozen=True)
class Untrained:
    """A fixed agent from another run; checkpoints hold only a digest of its weights."""

    agent: Agent

    @cached_property
    def sha256(self) -> torch.Tensor:
        digest = hashlib.sha256()
        for name, weight in sorted(self.agent.state_tensors().items()):
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {"sha256": self.sha256}

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise UserError if the agent's weights have another digest."""
        if not torch.equal(self.sha256, tensors["sha256"]):
            raise UserError(
                f"init_from: {self.agent.adapter}, which is not trained, holds other weights than "
                "when this run began; restore them, or start a new run"
            )


def _copy(
    parameters: Mapping[str, torch.nn.Parameter],
    weights: Mapping[str, torch.Tensor],
    source: str,
    *,
    exactly: bool,
) -> None:
    """Copy weights into parameters. ``exactly``: refuse weights without a matching parameter."""
    wrong = set(parameters) ^ set(weights) if exactly else set(parameters) - set(weights)
    wrong |= {n for n in set(parameters) & set(weights) if parameters[n].shape != weights[n].shape}
    if wrong:
        raise UserError(f"{source}: holds other weights than this team, e.g. {min(wrong)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def lora_layers(model: PreTrainedModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@contextlib.contextmanager
def through(layers: Sequence[LoraLayer], adapter: str | None) -> Iterator[None]:
    """Activate an adapter in these layers; None: disable adapters."""
    # PEFT's public methods would freeze the other adapters.
    before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
    for layer in layers:
        layer._disable_adapters = adapter is None
        if adapter is not None:
            layer._active_adapter = [adapter]
    try:
        yield
    finally:
        for layer, (disabled, active) in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = disabled, active


@contextlib.contextmanager
def modes(modules: Sequence[torch.nn.Module], training: bool) -> Iterator[None]:
    """Set modules to training or evaluation mode; restore their modes on exit."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = training
    try:
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode
