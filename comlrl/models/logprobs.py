"""Log-probabilities of packed actions under an agent: the forward pass that every loss uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from comlrl.models.agent import Agent
from comlrl.models.fast.packed_attention import Packed, rounded
from comlrl.models.fast.prefix_cache import full_attention
from comlrl.models.rows import attention_mask
from comlrl.types import Kept, TokenBatch

HEAD_CHUNK_BYTES = 256 << 20  # logits of one chunk; larger vocabularies are done in more chunks


@dataclass(frozen=True, slots=True)
class ActionLogprobs:
    """What one forward pass says about the A actions of a batch, in row-major order."""

    logprob_A: torch.Tensor  # float32 (float64 for a float64 model), under the temperature
    entropy_A: torch.Tensor | None  # of the distribution that chose each token
    hidden_AD: torch.Tensor  # the hidden states that chose them


def packable(agent: Agent) -> bool:
    """Whether siblings may share a row: a custom mask is taken, and no window cuts a row."""
    config = agent.model.config
    return config._attn_implementation in ("sdpa", "eager") and full_attention(config)


def action_logprobs(
    agent: Agent,
    batch: TokenBatch,
    temperature: float,
    *,
    entropy: bool = False,
    head: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    head_input_A: torch.Tensor | None = None,
) -> ActionLogprobs:
    """log π(a) of every action token, at the temperature that sampled it; where truncation left
    some tokens to choose from (``batch.kept``), π is over these alone.

    ``head`` (SHPPO) changes the hidden states, given ``head_input_A`` (A, latent_dim), before the
    language-model head.
    """
    hidden_AD, targets_A = action_states(agent, batch)
    chosen = hidden_AD if head is None else head(hidden_AD, head_input_A)  # type: ignore[arg-type]
    logprob, entropies = _head(agent, chosen, targets_A, batch.kept, temperature, entropy)
    return ActionLogprobs(logprob, entropies, hidden_AD)


def action_states(agent: Agent, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The last hidden states in which the A actions of a batch are chosen, and the actions."""
    if agent.fast is not None and agent.fast.learning:
        packed = Packed(batch, agent.device, agent.fast.step)
        return agent.fast.packed(packed, packed.chooser_A), packed.targets_A
    device = agent.device
    if packable(agent):
        visible = attention_mask(batch.segment_RL.to(device))
        if agent.model.config._attn_implementation == "eager":
            dtype = agent.model.dtype
            zero = torch.zeros((), dtype=dtype, device=device)
            mask = zero.where(visible, torch.finfo(dtype).min)
        else:
            mask = visible
    else:
        assert int(batch.segment_RL.max()) <= 1, "this model's rows cannot be packed"
        mask = (batch.segment_RL >= 0).long().to(device)
    hidden_RLD = agent.hidden(
        input_ids=batch.token_ids_RL.to(device),
        attention_mask=mask,
        position_ids=batch.positions_RL.to(device),
        use_cache=False,
    )
    row, column = batch.action_mask_RL.nonzero(as_tuple=True)
    hidden_AD = hidden_RLD[row.to(device), batch.previous_RL[row, column].to(device)]
    return hidden_AD, batch.token_ids_RL[row, column].to(device)


def _head(
    agent: Agent,
    hidden_AD: torch.Tensor,
    targets_A: torch.Tensor,
    kept: Kept | None,
    temperature: float,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chosen log-probabilities, and entropies where they are asked for, without holding all logits.

    A head that is trained, and entropies, have their chunks computed once more in backward.
    """
    step = 1 if agent.fast is None else agent.fast.step

    def part(
        hidden: torch.Tensor, targets: torch.Tensor, kept: Kept | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        more = rounded(len(hidden), step) - len(hidden)
        logits = agent.logits(F.pad(hidden, (0, 0, 0, more)))[: len(hidden)]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if temperature != 1:
            logits = logits / temperature
        if kept is not None:
            left = survivors(logits.detach(), targets, kept)
            # A finite number, as 0 · ∞ is none: these have probability 0 and no gradient.
            logits = logits.masked_fill(~left, torch.finfo(logits.dtype).min)
        if not entropy:  # the fused way
            return -F.cross_entropy(logits, targets, reduction="none"), None
        normalizer = logits.logsumexp(-1)
        logprob = logits.gather(-1, targets[:, None])[:, 0] - normalizer
        return logprob, normalizer - (logits.softmax(-1) * logits).sum(-1)

    head = agent.model.get_output_embeddings()
    chunk = max(step, HEAD_CHUNK_BYTES // (4 * len(head.weight)) // step * step)
    if len(hidden_AD) <= chunk:
        return part(hidden_AD, targets_A, kept)
    hiddens, targets = hidden_AD.split(chunk), targets_A.split(chunk)
    kepts = [None] * len(hiddens) if kept is None else split(kept, chunk)
    chunks = zip(hiddens, targets, kepts, strict=True)
    if entropy or any(weight.requires_grad for weight in head.parameters()):
        parts = [checkpoint(part, *own, use_reentrant=False) for own in chunks]
        entropies = [e for _, e in parts if e is not None]
        logprob_A = torch.cat([said for said, _ in parts])
        return logprob_A, torch.cat(entropies) if entropy else None
    return torch.cat([FrozenHead.apply(own[0], part, *own[1:]) for own in chunks]), None


class FrozenHead(torch.autograd.Function):
    """Each row's log π(a) and, at once, its gradient in that row's own hidden state.

    That is one vector, (w_a − Σ_v π_v w_v) / τ for an ordinary head, kept in place of logits, which
    are neither held nor computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_AD: torch.Tensor,
        part: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
        *more: Any,
    ) -> torch.Tensor:
        """``part``: hidden states, and ``more`` → (log π(a) of each row, …)."""
        if not ctx.needs_input_grad[0]:
            return part(hidden_AD, *more)[0]
        with torch.enable_grad():
            own_AD = hidden_AD.detach().requires_grad_()
            logprob_A, _ = part(own_AD, *more)
            (slope_AD,) = torch.autograd.grad(logprob_A.sum(), own_AD)
        ctx.save_for_backward(slope_AD)
        return logprob_A.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None, None]:
        (slope_AD,) = ctx.saved_tensors
        return slope_AD * grads[0][:, None].to(slope_AD), None, None, None


def survivors(logits: torch.Tensor, targets: torch.Tensor, kept: Kept) -> torch.Tensor:
    """Which tokens truncation left, bool (A, vocabulary): the ids that are kept or, by these
    logits, what is above the threshold; and always the token that was chosen."""
    if (kept.threshold_L < torch.inf).any():
        left = logits >= kept.threshold_L.to(logits)[:, None] + logits.logsumexp(-1, keepdim=True)
    else:
        left = torch.zeros_like(logits, dtype=torch.bool)
    row = torch.arange(len(targets)).repeat_interleave(kept.counts_L)
    left[row.to(logits.device), kept.ids_I.long().to(logits.device)] = True
    return left.scatter_(1, targets[:, None], True)


def split(kept: Kept, positions: int) -> list[Kept]:
    """Parts of so many positions each."""
    counts = kept.counts_L.split(positions)
    ids = kept.ids_I.split([int(part.sum()) for part in counts])
    return [
        Kept(*part) for part in zip(counts, ids, kept.threshold_L.split(positions), strict=True)
    ]
