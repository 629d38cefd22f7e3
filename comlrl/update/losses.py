"""Loss functions: pure functions of tensors, independent of models, trees and configurations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def policy_gradient(logprob_A: torch.Tensor, weight_A: torch.Tensor) -> torch.Tensor:
    """Compute L = −Σ_a w_a · log π(a).

    With w = Â_ig · w_t / (G · |nodes|) on each token of agent i's completion g, this is MAGRPO's
    loss (arXiv 2508.04652), without ratio, clipping and standard deviation, as each sample is used
    for one update. Arguments are of shape (A,); gradients flow only through ``logprob_A``.
    """
    return -(weight_A * logprob_A).sum()


def k3_kl(logprob_A: torch.Tensor, reference_A: torch.Tensor) -> torch.Tensor:
    """Compute k3 = exp(ρ) − ρ − 1 with ρ = log π_ref(a) − log π(a): an unbiased, non-negative
    estimate of KL(π ‖ π_ref) for each sampled token (Schulman 2020); shape (A,).

    Used as a loss, its gradient is not that of the KL it estimates: ∇k3 = (1 − exp(ρ)) ∇log π has
    the mean ∇KL(π_ref ‖ π) under π, while ∇KL(π ‖ π_ref) is the mean of −ρ ∇log π. Both vanish at
    π = π_ref and agree to first order near it. k3 is used because it weights a token that π has
    made likelier by less than 1, and because the KL coefficients of GRPO and TRL refer to it.
    """
    log_ratio = reference_A - logprob_A
    return log_ratio.exp() - log_ratio - 1


def clipped_policy(
    logprob_A: torch.Tensor, old_A: torch.Tensor, advantage_A: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """Compute PPO's clipped surrogate (arXiv 1707.06347, eq. 7), negated, for each token:

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
    """Compute ½ max((V − R)², (V_clip − R)²), V_clip = V_old + clip(V − V_old, ±ε); shape (A,).

    With ``clip_range`` None the loss is ½ (V − R)².
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
    """Compute agent i's loss on each of P joint preference pairs:

        L_i = −(1 − s) log σ(z) − s log σ(−z),   z = β (Δ_i + Σ_{j≠i} stop_gradient(Δ_j))

    Δ = log π(winner) − log π(loser), minus the same difference under the reference, if one is
    used. Shape (P,).
    """
    z = beta * (own_delta_P + others_delta_P.detach())
    return -(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)


def latent_entropy(sigma_SNK: torch.Tensor) -> torch.Tensor:
    """Compute SHPPO's L_e (arXiv 2404.03869): the entropy of N(μ_i, diag σ_i²), averaged over
    agents:

    (1/N) Σ_i Σ_k ½ log(2πe σ_ik²); shape (S,), nats
    """
    entropy_SNK = 0.5 * math.log(2 * math.pi * math.e) + sigma_SNK.log()
    return entropy_SNK.sum(-1).mean(-1)


def latent_logprob(
    latent_SNK: torch.Tensor, mu_SNK: torch.Tensor, sigma_SNK: torch.Tensor
) -> torch.Tensor:
    """Compute log N(l_i; μ_i, diag σ_i²) of each agent's latent; shape (S, N).

    −Σ_k [½ ((l_ik − μ_ik) / σ_ik)² + log σ_ik + ½ log 2π]
    """
    whitened_SNK = (latent_SNK - mu_SNK) / sigma_SNK
    return -(0.5 * whitened_SNK**2 + sigma_SNK.log() + 0.5 * math.log(2 * math.pi)).sum(-1)


def latent_distances(latent_SNK: torch.Tensor) -> torch.Tensor:
    """Compute 1 − cos(l_i, l_j) of each pair i < j of agents; shape (S, N(N−1)/2), empty for one
    agent."""
    first, second = torch.triu_indices(latent_SNK.shape[1], latent_SNK.shape[1], offset=1)
    return 1 - F.cosine_similarity(latent_SNK[:, first], latent_SNK[:, second], dim=-1)


def latent_diversity(distance_SP: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Compute SHPPO's L_d: mean over pairs of (d − low) / (high − low); shape (S,).

    ``low`` and ``high`` are the batch's extremes, without gradient: with one, distances would be
    pushed towards the largest instead of all increasing. The result is 0 for one agent, and if all
    distances are equal (as in one sample of two agents).
    """
    if distance_SP.shape[1] == 0 or high <= low:
        return distance_SP.new_zeros(len(distance_SP))
    return ((distance_SP - low) / (high - low)).mean(-1)


def latent_loss(
    value_S: torch.Tensor | float,
    entropy_S: torch.Tensor,
    diversity_S: torch.Tensor,
    lambda_e: float,
    lambda_d: float,
) -> torch.Tensor:
    """Compute SHPPO's L_latent = −L_v + λ_e L_e − λ_d L_d for each state; shape (S,).

    ``value_S`` is V_I(s, {μ_i, σ_i}) with V_I's weights frozen; 0 if the result is added to
    another loss.
    """
    return -value_S + lambda_e * entropy_S - lambda_d * diversity_S
