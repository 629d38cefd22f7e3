"""Log-probabilities of packed actions under an agent: the forward pass that every loss uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, noop_context_fn

from comlrl.models.agent import Agent
from comlrl.models.fast.compiled_update import call
from comlrl.models.fast.packed_attention import rounded
from comlrl.models.fast.prefix_cache import full_attention
from comlrl.models.rows import attention_mask
from comlrl.types import SamplingSupport, TokenBatch

# Limits on logits in float32. Larger ones are computed in chunks. With a frozen head, a chunk goes
# from logits to gradients in pieces that reuse memory, because allocating fresh memory takes a CPU
# longer than the computation.
HEAD_CHUNK_BYTES = 256 << 20
PIECE_BYTES = {"cpu": 10 << 20}  # elsewhere a chunk is one piece
FROZEN_BYTES = {"cpu": 32 << 20}  # of a frozen head's chunk; fewer are not divided


@dataclass(frozen=True, slots=True)
class ActionLogprobs:
    """The log-probabilities of a forward pass's A actions, in row-major order."""

    logprob_A: torch.Tensor  # float32 (float64 for a float64 model), under the temperature
    entropy_A: torch.Tensor | None  # of each token's distribution
    hidden_AD: torch.Tensor  # the hidden states that predict the actions


def packable(agent: Agent) -> bool:
    """Return whether siblings may share a row: custom masks work, and attention is full."""
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
    """Return log π(a) of every action token, at the temperature that sampled it.

    With ``batch.support``, π is over the tokens that truncation left.

    ``head`` (SHPPO) changes the hidden states, given ``head_input_A`` (A, latent_dim), before the
    language-model head.
    """
    hidden_AD, targets_A = action_states(agent, batch)
    chosen = hidden_AD if head is None else head(hidden_AD, head_input_A)  # type: ignore[arg-type]
    logprob, entropies = _head(agent, chosen, targets_A, batch.support, temperature, entropy)
    return ActionLogprobs(logprob, entropies, hidden_AD)


def action_states(agent: Agent, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last hidden states that predict the actions, (A, D), and the actions, (A,)."""
    if agent.fast is not None and agent.fast.learning:
        packed = agent.fast.pack(batch)
        return agent.fast.packed(packed, packed.predictor_A), packed.targets_A
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
    support: SamplingSupport | None,
    temperature: float,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the actions' log-probabilities and optional entropies, without storing all logits.

    With a trained head or entropies, chunks are recomputed in the backward pass.
    """
    step = 1 if agent.fast is None else agent.fast.step

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        more = rounded(len(hidden), step) - len(hidden)
        return agent.logits(F.pad(hidden, (0, 0, 0, more)))[: len(hidden)]

    def logprobs_of(
        logits: torch.Tensor, targets: torch.Tensor, support: SamplingSupport | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if compiled:
            return call(chosen_logprobs, [logits], targets, temperature), None
        logits = scaled(logits, temperature)
        if support is not None:
            left = survivors(logits.detach(), targets, support)
            # Finite, because 0 · ∞ is NaN; these tokens have probability 0 and no gradient.
            logits = logits.masked_fill(~left, torch.finfo(logits.dtype).min)
        if not entropy:  # fused
            return -F.cross_entropy(logits, targets, reduction="none"), None
        normalizer = logits.logsumexp(-1)
        logprob = logits.gather(-1, targets[:, None])[:, 0] - normalizer
        return logprob, normalizer - (logits.softmax(-1) * logits).sum(-1)

    def head_logprobs(
        hidden: torch.Tensor, targets: torch.Tensor, support: SamplingSupport | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logprobs_of(logits_of(hidden), targets, support)

    head = agent.model.get_output_embeddings()
    row = 4 * len(head.weight)  # bytes
    frozen = not entropy and not any(weight.requires_grad for weight in head.parameters())
    compiled = frozen and support is None and agent.fast is not None and agent.fast.compiled
    count = len(hidden_AD)
    if compiled:  # all pieces have one shape
        more = rounded(count, step) - count
        hidden_AD, targets_A = F.pad(hidden_AD, (0, 0, 0, more)), F.pad(targets_A, (0, more))
    most = HEAD_CHUNK_BYTES
    if frozen:
        most = min(most, FROZEN_BYTES.get(agent.device.type, most))
    chunk = max(step, most // row // step * step)
    if len(hidden_AD) * row <= most and not compiled:
        return head_logprobs(hidden_AD, targets_A, support)
    chunks = [(hidden_AD[rows], *rest) for rows, *rest in _parts(targets_A, support, chunk)]
    if not frozen:
        contexts = noop_context_fn if agent.router is None else agent.router.checkpoint_contexts
        parts = [
            checkpoint(head_logprobs, *chunk, use_reentrant=False, context_fn=contexts)
            for chunk in chunks
        ]
        entropies = [e for _, e in parts if e is not None]
        logprob_A = torch.cat([logprobs for logprobs, _ in parts])
        return logprob_A, torch.cat(entropies) if entropy else None
    bytes_at_once = PIECE_BYTES.get(agent.device.type, HEAD_CHUNK_BYTES)
    piece = step if compiled else max(1, bytes_at_once // row)
    parts = [FrozenHead.apply(*chunk, logits_of, logprobs_of, piece) for chunk in chunks]
    return torch.cat(parts)[:count], None


def scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1 else logits / temperature


def chosen_logprobs(
    logits_AV: torch.Tensor, targets_A: torch.Tensor, temperature: float
) -> torch.Tensor:
    return -F.cross_entropy(scaled(logits_AV, temperature), targets_A, reduction="none")


def _parts(
    targets_A: torch.Tensor, support: SamplingSupport | None, size: int
) -> Iterator[tuple[slice, torch.Tensor, SamplingSupport | None]]:
    """Yield slices, targets and support, in parts of at most ``size`` actions."""
    targets = targets_A.split(size)
    supports = [None] * len(targets) if support is None else split(support, size)
    for number, (targets_part, support_part) in enumerate(zip(targets, supports, strict=True)):
        yield slice(number * size, (number + 1) * size), targets_part, support_part


class FrozenHead(torch.autograd.Function):
    """Each row's log π(a); the gradient in the row's hidden state is computed in the forward pass.

    The gradient is a vector, (w_a − Σ_v π_v w_v) / τ for an ordinary head. It is stored instead of
    the logits, which are neither kept nor recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_AD: torch.Tensor,
        targets_A: torch.Tensor,
        support: SamplingSupport | None,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        logprobs_of: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
        piece: int,
    ) -> torch.Tensor:
        """Compute log-probabilities in pieces.

        ``logprobs_of``: logits, targets and support, of up to ``piece`` rows → (log π(a) of each,
        …).
        """
        learns = ctx.needs_input_grad[0]
        with torch.set_grad_enabled(learns):
            leaf_AD = hidden_AD.detach().requires_grad_(learns)
            logits_AV = logits_of(leaf_AD)
        slope_AV = torch.empty_like(logits_AV) if learns else None
        logprobs = []
        for rows, *rest in _parts(targets_A, support, piece):
            with torch.set_grad_enabled(learns):
                logits = logits_AV[rows].detach().requires_grad_(learns)
                logprob, _ = logprobs_of(logits, *rest)
            if slope_AV is not None:
                (slope_AV[rows],) = torch.autograd.grad(logprob, logits, torch.ones_like(logprob))
            logprobs.append(logprob.detach())
        if slope_AV is not None:
            ctx.save_for_backward(*torch.autograd.grad(logits_AV, leaf_AD, slope_AV))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        (slope_AD,) = ctx.saved_tensors
        return slope_AD * grads[0][:, None].to(slope_AD), None, None, None, None, None


def survivors(
    logits: torch.Tensor, targets: torch.Tensor, support: SamplingSupport
) -> torch.Tensor:
    """Return the mask of the tokens that truncation left, bool (A, vocabulary).

    They are the stored ids or, by these logits, those above the threshold; and always the chosen
    token.
    """
    if (support.threshold_L < torch.inf).any():
        left = logits >= support.threshold_L.to(logits)[:, None] + logits.logsumexp(
            -1, keepdim=True
        )
    else:
        left = torch.zeros_like(logits, dtype=torch.bool)
    row = torch.arange(len(targets)).repeat_interleave(support.counts_L)
    place = row * logits.shape[-1] + support.ids_I.long().cpu()
    left.view(-1).index_fill_(0, place.to(logits.device), True)
    return left.scatter_(1, targets[:, None], True)


def split(support: SamplingSupport, positions: int) -> list[SamplingSupport]:
    """Split into parts of this many positions each."""
    counts = support.counts_L.split(positions)
    ids = support.ids_I.split([int(part.sum()) for part in counts])
    return [
        SamplingSupport(*part)
        for part in zip(counts, ids, support.threshold_L.split(positions), strict=True)
    ]
