"""The equations: tensors in, loss out. Nothing here knows a model, a tree or a configuration."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def policy_gradient(logprob_A: torch.Tensor, weight_A: torch.Tensor) -> torch.Tensor:
    """L = −Σ_a w_a · log π(a).

    With w = Â_ig · w_t / (G · |nodes|) on each token of agent i's completion g this is MAGRPO's
    loss (arXiv 2508.04652, without ratio, clip and standard deviation: one update a sample).
    Both of shape (A,); gradients flow through ``logprob_A`` alone.
    """
    return -(weight_A * logprob_A).sum()


def k3_kl(logprob_A: torch.Tensor, reference_A: torch.Tensor) -> torch.Tensor:
    """k3 = exp(ρ) − ρ − 1 with ρ = log π_ref(a) − log π(a): an unbiased, non-negative estimate of
    KL(π ‖ π_ref) for each sampled token (Schulman 2020); shape (A,)."""
    log_ratio = reference_A - logprob_A
    return log_ratio.exp() - log_ratio - 1


def clipped_policy(
    logprob_A: torch.Tensor, old_A: torch.Tensor, advantage_A: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), negated, for each token:

    −min(ρ Â, clip(ρ, 1 − ε, 1 + ε) Â),   ρ = exp(log π − log π_old); shape (A,)
    """
    ratio = (logprob_A - old_A).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantage_A, clipped * advantage_A)


def clipped_value(
    value_A: torch.Tensor,
    old_A: torch.Tensor,
    return_A: torch.Tensor,
    clip_range: float | None,
) -> torch.Tensor:
    """½ max((V − R)², (V_clip − R)²), V_clip = V_old + clip(V − V_old, ±ε); shape (A,).

    ``clip_range`` None: ½ (V − R)².
    """
    loss = (value_A - return_A) ** 2
    if clip_range is not None:
        clipped = old_A + (value_A - old_A).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, (clipped - return_A) ** 2)
    return 0.5 * loss


def joint_dpo(
    own_delta_P: torch.Tensor,
    others_delta_P: torch.Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Agent i's loss on each of P joint preference pairs:

        L_i = −(1 − s) log σ(z) − s log σ(−z),   z = β (Δ_i + Σ_{j≠i} stop_gradient(Δ_j))

    Δ = log π(winner) − log π(loser), less the reference's where one is used. Shape (P,).
    """
    z = beta * (own_delta_P + others_delta_P.detach())
    return -(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)


def bradley_terry(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
    """−log σ(r_chosen − r_rejected) for each pair; shape (P,)."""
    return -F.logsigmoid(chosen_P - rejected_P)
