"""The policy update shared by MAGRPO, PPO and SHPPO: rows with advantages → optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from comlrl.config.algorithms import ActorCriticConfig, MAGRPOConfig
from comlrl.models.agent import Agent
from comlrl.models.logprobs import ActionLogprobs
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.processes.statistics import Sums, moments
from comlrl.types import Row, TokenBatch
from comlrl.update.accumulate import accumulate, measure_all
from comlrl.update.losses import clipped_policy, k3_kl
from comlrl.update.minibatches import Pass
from comlrl.update.optimizer import AgentOptimizer
from comlrl.update.per_token import PerToken

# (batch, its log-probabilities, sums for the log) → loss of each token, shape (A,)
TokenLoss = Callable[[TokenBatch, ActionLogprobs, Sums], torch.Tensor]


class PolicyUpdate:
    """The update of one policy in one training step, with advantages set by the trainer.

    For action tokens a, with the ratio ρ_a = π(a) / π_old(a), the weight w_a of the token's
    completion (turn weight times importance) and a denominator D over all processes:

        L = (1/D) Σ_a [−w_a min(ρ_a Â_a, clip(ρ_a, 1 ± ε) Â_a) − c_H H_a + kl_in_loss · k3_a]

    If each sample is used only once (``section.takes_ratios`` false), the first term is
    −w_a Â_a log π(a), which has the same gradient.
    """

    def __init__(
        self,
        section: ActorCriticConfig | MAGRPOConfig,
        team: Team,
        agent: Agent,
        read: Callable[[TokenBatch], ActionLogprobs],
        read_reference: Callable[[Agent, TokenBatch], ActionLogprobs],
        kl_in_loss: float = 0.0,
    ) -> None:
        """Set up the update. ``read`` and ``read_reference`` compute log-probabilities under the
        current policy and under the reference. ``kl_in_loss``: weight of the k3 term."""
        self.section, self.team, self.agent = section, team, agent
        self.read, self.read_reference, self.kl_in_loss = read, read_reference, kl_in_loss
        # Log-probabilities before the first update, and under the reference.
        self.old, self.reference, self.advantage = PerToken(), PerToken(), PerToken()

    def measure(
        self,
        minibatches: Sequence[Sequence[Row]],
        also: Callable[[TokenBatch, ActionLogprobs], None] | None = None,
    ) -> None:
        """Measure old and reference log-probabilities, batched as in the first epoch's updates on
        these minibatches. One that is left out is measured in its own update, which must be the
        step's first. Either way the first ratios are exactly 1. ``also`` is called on every
        batch."""

        def measure(batch: TokenBatch) -> None:
            policy = self.read(batch)
            self.old.put(batch, policy.logprob_A)
            if also is not None:
                also(batch, policy)
            if self.section.kl_coef > 0:
                self.reference.put(batch, self._reference_logprob(batch))

        for rows in minibatches:
            measure_all(self.agent, rows, measure, self.team.run_parallel)

    def _reference_logprob(self, batch: TokenBatch) -> torch.Tensor:
        with torch.no_grad(), self.team.reference(self.agent.index) as reference:
            return self.read_reference(reference, batch).logprob_A

    def before(self) -> dict[str, float]:
        """Return metrics of the policy before its update, after all samples were measured."""
        old, metrics = self.old.flat(), dict[str, float]()
        if self.section.entropy_coef == 0:
            metrics["entropy"] = -moments(old)[1]
        if self.section.kl_coef > 0:
            metrics["kl"] = moments(old - self.reference.flat())[1]
        return metrics

    def credit(self, advantage: PerToken, rows: Iterable[Row]) -> None:
        """Set the advantages of each completion: one for each token, or one shared by all."""
        for row in rows:
            for number, tokens in zip(row.indices, row.chosen, strict=True):
                token_advantages = advantage.of_completion[number].to(self.agent.device)
                self.advantage.of_completion[number] = token_advantages.expand(tokens)

    def update(
        self,
        rows: Sequence[Row],
        optimizers: Sequence[AgentOptimizer],
        sums: Sums,
        progress: float,
        loss: TokenLoss | None = None,
    ) -> float:
        """Step the optimizers on the mean loss over these rows' tokens; return the first
        optimizer's unclipped gradient norm. ``loss`` replaces ``PolicyUpdate.loss``."""
        tokens = int(distributed.total(sum(sum(row.chosen) for row in rows)))
        self.gradients(rows, optimizers, tokens, sums, loss)
        norm, *_ = [optimizer.step(progress) for optimizer in optimizers]
        return norm

    def gradients(
        self,
        rows: Sequence[Row],
        optimizers: Sequence[AgentOptimizer],
        denominator: int,
        sums: Sums,
        loss: TokenLoss | None = None,
    ) -> None:
        """Compute ∇L over these rows for the optimizers' parameters. ``denominator``: D. ``loss``
        replaces ``PolicyUpdate.loss``."""

        def batch_loss(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
            of_batch = Sums()
            loss_A = (loss or self.loss)(batch, self.read(batch), of_batch)
            of_batch.add(loss=loss_A)
            return loss_A.sum() / denominator, of_batch

        for optimizer in optimizers:
            optimizer.zero()
        accumulate(
            self.agent,
            rows,
            batch_loss,
            sums,
            parameters=[p for optimizer in optimizers for p in optimizer.parameters],
            concurrent=self.team.run_parallel,
        )

    def loss(self, batch: TokenBatch, policy: ActionLogprobs, sums: Sums) -> torch.Tensor:
        """Compute the policy loss of each token, shape (A,), and add statistics to ``sums``."""
        section, logprob_A = self.section, policy.logprob_A
        advantage_A = self.advantage.get(batch).to(logprob_A)
        if section.takes_ratios:
            old_A = self.old.once(batch, lambda: logprob_A)
            loss_A = clipped_policy(logprob_A, old_A, advantage_A, section.clip_range)
            sums.absorb(ratio_sums(logprob_A, old_A, section.clip_range))
        else:
            loss_A = -advantage_A * logprob_A
        sums.add(tokens=len(loss_A), policy_loss=loss_A)
        loss_A = loss_A * batch.weight_RL[batch.action_mask_RL].to(loss_A)
        if section.entropy_coef > 0:
            assert policy.entropy_A is not None
            loss_A = loss_A - section.entropy_coef * batch.corrected(policy.entropy_A)
            sums.add(entropy=policy.entropy_A)
        if self.kl_in_loss > 0:
            reference_A = self.reference.once(batch, lambda: self._reference_logprob(batch))
            kl_A = k3_kl(logprob_A, reference_A)
            loss_A = loss_A + self.kl_in_loss * batch.corrected(kl_A)
            sums.add(kl=kl_A)
        return loss_A


@torch.no_grad()
def ratio_sums(logprob_A: torch.Tensor, old_A: torch.Tensor, clip_range: float) -> Sums:
    """Sum statistics of importance ratios: clipped fraction, KL(old ‖ new) and the maximum."""
    ratio_A = (logprob_A - old_A).exp()
    sums = Sums(
        clip_fraction=((ratio_A - 1).abs() > clip_range).float(),
        approx_kl=k3_kl(old_A, logprob_A),  # the samples are the old policy's
    )
    sums.reach(ratio_max=ratio_A.max() if len(ratio_A) else 0.0)
    return sums


def run_epochs(
    passes: Iterable[Pass],
    target_kl: float | None,
    update: Callable[[list[int], Sums, float], float],
    after: Callable[[Pass], Mapping[str, float]] = lambda epoch: {},
) -> dict[str, float]:
    """Update on every minibatch of every pass, until a pass's mean KL(old ‖ new) exceeds
    ``target_kl``.

    ``update``: (states, sums for the log, progress) → gradient norm. ``after`` is called after the
    minibatches of a pass and returns metrics. Returns metrics, including ``updates``.
    """
    sums, norms, metrics = Sums(), [], dict[str, float]()
    for epoch in passes:
        of_pass = Sums()
        norms += [update(states, of_pass, progress) for states, progress in epoch.minibatches]
        metrics |= after(epoch)
        sums.absorb(of_pass)
        metrics["approx_kl"] = of_pass.means("tokens")["approx_kl"]
        if target_kl is not None and metrics["approx_kl"] > target_kl:
            break
    ends = {
        "ppo_epochs": float(epoch.number),
        "updates": float(len(norms)),
        "gradient_norm": max(norms),
    }
    return sums.means("tokens") | metrics | ends
