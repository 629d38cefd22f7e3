"""Log-probabilities of packed actions under an agent: the forward pass that every loss uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    return ActionLogprobs(logprob, entropies if entropy else None, hidden_AD)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen log-probabilities without holding all logits: chunks are recomputed in backward."""

    def part(
        hidden: torch.Tensor, targets: torch.Tensor, kept: Kept | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = 1 if agent.fast is None else agent.fast.step
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
            logprob = -F.cross_entropy(logits, targets, reduction="none")
            return logprob, logprob.detach()
        normalizer = logits.logsumexp(-1)
        logprob = logits.gather(-1, targets[:, None])[:, 0] - normalizer
        return logprob, normalizer - (logits.softmax(-1) * logits).sum(-1)

    vocabulary = agent.model.get_output_embeddings().weight.shape[0]
    chunk = max(1, HEAD_CHUNK_BYTES // (4 * vocabulary))
    if len(hidden_AD) <= chunk:
        return part(hidden_AD, targets_A, kept)
    hiddens, targets = hidden_AD.split(chunk), targets_A.split(chunk)
    kepts = [None] * len(hiddens) if kept is None else split(kept, chunk)
    parts = [
        checkpoint(part, *own, use_reentrant=False)
        for own in zip(hiddens, targets, kepts, strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


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
