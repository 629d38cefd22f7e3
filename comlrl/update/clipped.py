"""PPO's clipped update of a policy: its old log-probabilities, then epochs of minibatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from comlrl.config.algorithms import ActorCriticConfig
from comlrl.models.agent import Agent
from comlrl.models.logprobs import ActionLogprobs
from comlrl.models.team import Team
from comlrl.processes.distributed import Processes
from comlrl.processes.statistics import Sums, moments
from comlrl.types import Row, TokenBatch
from comlrl.update.accumulate import accumulate
from comlrl.update.losses import clipped_policy, k3_kl
from comlrl.update.minibatches import Pass
from comlrl.update.old_logprobs import OldLogprobs
from comlrl.update.optimizer import AgentOptimizer
from comlrl.update.per_token import PerToken


class ClippedPolicy:
    """One policy in one training step. Credit is the trainer's: it fills ``advantage``.

    Per action token a with ρ_a = π(a) / π_old(a), turn weight w_t and a minibatch of A tokens:

        L = (1/A) Σ_a [−w_t min(ρ_a Â_a, clip(ρ_a, 1 ± ε) Â_a) − c_H H_a + kl_in_loss · k3_a]
    """

    def __init__(
        self,
        section: ActorCriticConfig,
        team: Team,
        agent: Agent,
        read: Callable[[TokenBatch], ActionLogprobs],
        read_reference: Callable[[Agent, TokenBatch], ActionLogprobs],
        kl_in_loss: float = 0.0,
    ) -> None:
        """``read``: log-probabilities under the present policy; ``read_reference``: under the
        reference. ``kl_in_loss``: weight of the k3 term."""
        self.section, self.team, self.agent = section, team, agent
        self.read, self.kl_in_loss = read, kl_in_loss
        self.old, self.advantage = OldLogprobs(team, agent, read, read_reference), PerToken()

    def measure(
        self,
        minibatches: Sequence[Sequence[Row]],
        also: Callable[[TokenBatch, ActionLogprobs], None] | None = None,
    ) -> None:
        """Old log-probabilities and the reference's, on these minibatches of the first epoch's own
        tensors. What is not measured here is read by its own first pass, which must be the first
        of all; either way the first ratios are exactly 1. ``also`` sees every batch."""
        for rows in minibatches:
            self.old.measure(rows, reference=self.section.kl_coef > 0, also=also)

    def before(self) -> dict[str, float]:
        """What the log wants of the policy before its update, once all of it has been read."""
        old, processes, metrics = self.old.policy.flat(), self.team.processes, dict[str, float]()
        if self.section.entropy_coef == 0:
            metrics["entropy"] = -moments(old, processes)[1]
        if self.section.kl_coef > 0:
            metrics["kl"] = moments(old - self.old.reference.flat(), processes)[1]
        return metrics

    def credit(self, advantage: PerToken, rows: Iterable[Row]) -> None:
        """Each completion takes an advantage for each of its tokens, or one for all of them."""
        for row in rows:
            for number, tokens in zip(row.indices, row.chosen, strict=True):
                own = advantage.of_completion[number].to(self.agent.device)
                self.advantage.of_completion[number] = own.expand(tokens)

    def update(
        self,
        rows: Sequence[Row],
        optimizers: Sequence[AgentOptimizer],
        sums: Sums,
        progress: float,
        also: Callable[[TokenBatch, ActionLogprobs, Sums], torch.Tensor] | None = None,
    ) -> float:
        """One step of the optimizers on these rows; the first one's gradient norm, unclipped.

        ``also``: a further loss for each token, from the log-probabilities of the batch.
        """
        tokens = int(self.team.processes.total(sum(sum(row.chosen) for row in rows)))

        def loss(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
            policy, of_batch = self.read(batch), Sums()
            loss_A = self.loss(batch, policy, of_batch)
            if also is not None:
                loss_A = loss_A + also(batch, policy, of_batch)
            of_batch.add(loss=loss_A)
            return loss_A.sum() / tokens, of_batch

        for optimizer in optimizers:
            optimizer.zero()
        accumulate(
            self.agent,
            rows,
            loss,
            sums,
            parameters=[p for optimizer in optimizers for p in optimizer.parameters],
            concurrent=self.team.run_parallel,
        )
        norm, *_ = [optimizer.step(progress) for optimizer in optimizers]
        return norm

    def loss(self, batch: TokenBatch, policy: ActionLogprobs, sums: Sums) -> torch.Tensor:
        """The policy's loss for each token, (A,); sums for the log are added to ``sums``."""
        section, old_A = self.section, self.old.of_policy(batch, policy.logprob_A)
        advantage_A = self.advantage.get(batch)
        loss_A = clipped_policy(policy.logprob_A, old_A, advantage_A, section.clip_range)
        sums.add(tokens=len(loss_A), policy_loss=loss_A)
        sums.absorb(ratio_sums(policy.logprob_A, old_A, section.clip_range))
        loss_A = loss_A * batch.weight_RL[batch.action_mask_RL].to(loss_A)
        if section.entropy_coef > 0:
            assert policy.entropy_A is not None
            loss_A = loss_A - section.entropy_coef * batch.corrected(policy.entropy_A)
            sums.add(entropy=policy.entropy_A)
        if self.kl_in_loss > 0:
            reference_A = self.old.of_reference(batch)
            kl_A = batch.corrected(k3_kl(policy.logprob_A, reference_A))
            loss_A = loss_A + self.kl_in_loss * kl_A
        return loss_A


@torch.no_grad()
def ratio_sums(logprob_A: torch.Tensor, old_A: torch.Tensor, clip_range: float) -> Sums:
    """What the log wants of importance ratios: how many are clipped, KL(old ‖ new), the largest."""
    ratio_A = (logprob_A - old_A).exp()
    sums = Sums(
        clip_fraction=((ratio_A - 1).abs() > clip_range).float(),
        approx_kl=k3_kl(old_A, logprob_A),  # the samples are the old policy's
    )
    sums.reach(ratio_max=ratio_A.max() if len(ratio_A) else 0.0)
    return sums


def run_epochs(
    processes: Processes,
    passes: Iterable[Pass],
    target_kl: float | None,
    update: Callable[[list[int], Sums, float], float],
    after: Callable[[Pass], Mapping[str, float]] = lambda one: {},
) -> dict[str, float]:
    """Every minibatch of every pass, until an epoch's mean KL(old ‖ new) exceeds ``target_kl``.

    ``update``: states, sums for the log, progress → the gradient's norm. ``after``: what follows
    the minibatches of a pass. Returns what the log wants; ``updates`` among it.
    """
    sums, norms, metrics = Sums(), [], dict[str, float]()
    for one in passes:
        of_pass = Sums()
        norms += [update(states, of_pass, progress) for states, progress in one.minibatches]
        metrics |= after(one)
        sums.absorb(of_pass)
        metrics["approx_kl"] = of_pass.means("tokens", processes)["approx_kl"]
        if target_kl is not None and metrics["approx_kl"] > target_kl:
            break
    ends = {
        "ppo_epochs": float(one.number),
        "updates": float(len(norms)),
        "gradient_norm": max(norms),
    }
    return sums.means("tokens", processes) | metrics | ends
