"""MADPO: multi-agent direct preference optimization on joint preference pairs.

Each of ``num_iterations`` rounds samples joint candidates from the current policies, compares them
(``comlrl/preferences``), and trains on the resulting pairs and on pairs replayed from earlier
rounds. For pairs of a winner w and a loser l, weighted within an update by ω (1, or λ^age), agent i
minimizes

    L_i = −(1/Σ ω) Σ_pairs ω log σ(β (Δ_i + Σ_{j≠i} stop_gradient(Δ_j)))
    Δ_i = log π_i(w_i | prompt_i) − log π_i(l_i | prompt_i)

minus the same difference under the reference policy: the initial policy, or the one at the start of
the round. The joint policy factorizes over the agents, so Σ_i Δ_i is the joint log-ratio of DPO
(arXiv 2305.18290): all agents raise the same margin, each through its own weights. If a pair
differs in one agent only (``joint_mode: cross``), the Δ of the other agents are 0.

With ``turn_order: sequential``, prompt_i contains what earlier agents wrote in the same candidate.
Δ_i is conditioned on it, so the Δ still sum to the joint log-ratio.

Departures from DPO: there is no reference policy by default; log-probabilities use the sampling
temperature and the full vocabulary, even if sampling was truncated by top_p or top_k.
``label_smoothing`` is that of cDPO.

Gradients are computed in two steps by the chain rule, without approximation: first all Δ without
gradients, then one backward pass per agent, with ∂L_i/∂Δ_i as the coefficient of its completions'
tokens. Each step processes a completion once, however many pairs contain it, and micro-batches may
be split anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

import torch

from comlrl.config.algorithms import MADPOConfig
from comlrl.keyed import order
from comlrl.loop.loop import Loop
from comlrl.loop.parts import Part
from comlrl.loop.steps import Gathered, Step
from comlrl.models.agent import Agent
from comlrl.models.logprobs import action_logprobs
from comlrl.models.team import Team
from comlrl.preferences.candidates import CandidateSet
from comlrl.preferences.collector import Collector
from comlrl.preferences.pair_batches import (
    PairBatch,
    ReferenceValues,
    TokenizedCompletion,
    Weighted,
    all_candidates,
    distinct_completions,
    interleaved,
    logprobs,
    rows_of,
)
from comlrl.preferences.pairs import Round, TaskPairs
from comlrl.processes import distributed
from comlrl.processes.statistics import Sums
from comlrl.types import Sampling, TokenBatch
from comlrl.update.accumulate import accumulate
from comlrl.update.losses import joint_dpo, policy_gradient
from comlrl.update.minibatches import like_parts
from comlrl.update.optimizer import policy_optimizer
from comlrl.update.worker_threads import run_parallel


class MADPOTrainer:
    """Trainer that alternates between labelling candidates and learning from their pairs."""

    def __init__(
        self,
        section: MADPOConfig,
        team: Team,
        loop: Loop,
        sampling: Sampling,
        collector: Collector,
    ) -> None:
        self.section, self.team, self.loop = section, team, loop
        self.sampling, self.collector = sampling, collector
        self.round: Round | None = None  # the current round
        self.optimizers = {i: policy_optimizer(section, team, i) for i in team.trained}
        self.reference = ReferenceValues(len(team))

    def train(self) -> None:
        for step in self.loop.steps(self, lambda trees: self._measure()):
            self.step(step)

    def parts(self) -> Mapping[str, Part]:
        optimizers = {f"optimizer_{i}": o for i, o in self.optimizers.items()}
        held = {} if self.section.dpo_reference == "none" else {"reference_values": self.reference}
        return self.team.parts() | optimizers | held

    def begin_round(self, index: int) -> None:
        """Label the round's candidates and compute their reference log-probabilities."""
        self.round = self.collector.round(index)
        if self.section.dpo_reference == "none":
            return
        read = [self.round, *(earlier for earlier, _ in self.collector.replayed(index))]
        tasks = [item for each in read for item in (*each.train, *each.held_out)]
        if self.reference.round != index:  # not resumed in the middle of the round
            self.reference.take(index, self._reference_values(tasks))
        agents = self.team.agents
        self.reference.name(
            [self._completions(agent, all_candidates(tasks))[0] for agent in agents]
        )

    def _completions(
        self, agent: Agent, candidates_C: Sequence[tuple[CandidateSet, int]]
    ) -> tuple[list[TokenizedCompletion], list[int]]:
        sampled_here = self.section.preferences is None
        return distinct_completions(agent, candidates_C, sampled_here)

    def _reference_values(self, tasks: Sequence[TaskPairs]) -> list[torch.Tensor]:
        """Compute log π_ref of each agent's distinct completions of the tasks, in their order."""
        first = self.section.dpo_reference == "start"
        values_N = []
        for index, agent in enumerate(self.team.agents):
            completions_U, _ = self._completions(agent, all_candidates(tasks))
            groups = [
                list(group) for _, group in groupby(completions_U, key=lambda s: s.prompt_ids)
            ]
            shard = [completion for group in distributed.shard(groups) for completion in group]
            with (self.team.reference if first else self.team.acting)(index) as reading:
                value_U = logprobs(reading, shard, self._temperature(index)).tolist()
            local = dict(zip(shard, value_U, strict=True))
            everything = {s: v for part in distributed.all_gather(local) for s, v in part.items()}
            values_N.append(
                torch.tensor([everything[s] for s in completions_U], dtype=torch.float64)
            )
        return values_N

    def step(self, step: Step) -> None:
        """Train once on every pair of the step's tasks; skip tasks that are held out or have no
        pairs."""
        assert self.round is not None
        pairs = self._pairs(step)
        env_steps = 2 * len(pairs)
        if not self.section.use_environment_step:  # count the candidates at the round's first step
            begins = step.index - 1 == self.loop.schedule.start_of(self.round.index)
            labelled = self.round.tasks if begins and self.section.preferences is None else ()
            env_steps = sum(len(item.candidates.candidates_K) for item in labelled)
        span = self.loop.span(env_steps)
        parts = like_parts(len(pairs), self.section.train_batch_size)
        sums = Sums()
        norms_UN = [
            self._update(pairs[part.start : part.stop], sums, span.at(u, len(parts)))
            for u, part in enumerate(parts)
        ]
        step.clock.lap("update")
        metrics = {
            "preferences/pairs": float(len(pairs)),
            "preferences/reward_mean": self.round.reward_mean,
            "preferences/labelled": float(self.collector.labelled),
            "pairs_per_second": len(pairs) / step.clock.total,
        }
        if pairs:
            metrics |= self._means(sums) | self._of_updates(norms_UN)
            metrics["preferences/gap_mean"] = sum(p.pair.gap for p in pairs) / len(pairs)
        # scored=0: the collector has already counted the scored candidates.
        sampled = Gathered(trees=(), env_steps=env_steps, scored=0, tokens=0, span=span)
        self.loop.record(step, sampled, updates=len(parts), metrics=metrics)

    def _of_updates(self, norms_UN: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return each trained agent's largest gradient norm, their mean, and the learning rate."""
        norm_N = [max(norms_U) for norms_U in zip(*norms_UN, strict=True)]
        of_agents = {
            f"agent_{i}/gradient_norm": n for i, n in zip(self.team.trained, norm_N, strict=True)
        }
        return of_agents | {
            "gradient_norm": sum(norm_N) / len(norm_N),
            "learning_rate": self.optimizers[self.team.trained[0]].learning_rate,
        }

    def _pairs(self, step: Step) -> list[Weighted]:
        """Collect the pairs of the step's tasks, and an equal fraction of the pairs of each
        replayed round."""
        assert self.round is not None
        tasks = {t.task_id for t in step.tasks}
        pairs = interleaved([item for item in self.round.train if item.task_id in tasks])
        part, parts = self.loop.schedule.part_of(step.index - 1)
        for earlier, weight in self.collector.replayed(self.round.index):
            chosen = order((self.loop.schedule.seed, "replay", step.epoch), len(earlier.train))[
                part::parts
            ]
            pairs += interleaved([earlier.train[i] for i in sorted(chosen)], weight)
        return pairs

    def _update(self, pairs: Sequence[Weighted], sums: Sums, progress: float) -> list[float]:
        """Take one optimizer step for every trained agent; return their gradient norms."""
        batch = PairBatch.from_pairs(distributed.shard(pairs))
        delta_NP = self._deltas(batch)
        sums.absorb(self._metrics(batch, delta_NP))
        total = sum(item.weight for item in pairs)
        jobs = [
            partial(self._gradients, index, batch, delta_NP, total) for index in self.optimizers
        ]
        run_parallel(jobs, self.team.device, self.team.run_parallel)
        self.reference.moved = True
        return [optimizer.step(progress) for optimizer in self.optimizers.values()]

    def _gradients(
        self, index: int, batch: PairBatch, delta_NP: torch.Tensor, total: float
    ) -> None:
        """Compute ∇L_i: the coefficients ∂L_i/∂Δ_i at the current Δ, then the backward pass."""
        self.optimizers[index].zero()
        own_P = delta_NP[index].clone().requires_grad_(True)
        others_P = delta_NP.sum(0) - delta_NP[index]
        loss_P = joint_dpo(own_P, others_P, self.section.dpo_beta, self.section.label_smoothing)
        (weight_P,) = torch.autograd.grad((batch.weight_P * loss_P).sum() / total, own_P)
        completions_U, owner_C = self._completions(self.team.agents[index], batch.candidates_C)
        # policy_gradient returns −Σ w log π, hence the sign.
        weight_U = torch.zeros(len(completions_U), dtype=weight_P.dtype)
        weight_U.index_add_(
            0, torch.tensor(owner_C, dtype=torch.long), -batch.coefficients(weight_P)
        )
        with self.team.acting(index) as agent:
            accumulate(
                agent,
                rows_of(completions_U, weight_U.tolist()),
                lambda packed: self._loss(agent, packed),
                Sums(),
                concurrent=self.team.run_parallel,
            )

    def _loss(self, agent: Agent, batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
        """Return a sum over tokens whose gradient is this micro-batch's share of ∇L_i."""
        logprob_A = action_logprobs(agent, batch, self._temperature(agent.index)).logprob_A
        weight_A = batch.weight_RL[batch.action_mask_RL]
        return policy_gradient(logprob_A, weight_A.to(logprob_A)), Sums()

    def _deltas(self, batch: PairBatch) -> torch.Tensor:
        """Compute Δ for every agent and pair, shape (N, P), without gradients."""
        jobs = [partial(self._delta, index, batch) for index in range(len(self.team))]
        return torch.stack(run_parallel(jobs, self.team.device, self.team.run_parallel))

    def _delta(self, index: int, batch: PairBatch) -> torch.Tensor:
        if self.section.dpo_reference == "round" and not self.reference.moved:
            # The policies still equal the reference.
            return torch.zeros(len(batch.weights), dtype=torch.float64)
        completions_U, owner_C = self._completions(self.team.agents[index], batch.candidates_C)
        with self.team.acting(index) as agent:
            value_U = logprobs(agent, completions_U, self._temperature(index))
        if self.section.dpo_reference != "none":
            value_U = value_U - self.reference.values_of(index, completions_U)
        return batch.differences(value_U[owner_C])

    def _temperature(self, index: int) -> float:
        return self.sampling.for_agent(index).temperature

    def _measure(self) -> dict[str, float]:
        """Evaluate the current policies on the round's held-out pairs."""
        sums, pairs = Sums(), interleaved(self.round.held_out if self.round else ())
        for at in range(0, len(pairs), 64):
            batch = PairBatch.from_pairs(distributed.shard(pairs[at : at + 64]))
            sums.absorb(self._metrics(batch, self._deltas(batch)))
        return self._means(sums) if pairs else {}

    def _metrics(self, batch: PairBatch, delta_NP: torch.Tensor) -> Sums:
        """Return weighted sums of metrics over this process's pairs, for the joint Δ and for each
        agent's Δ alone."""
        beta, smoothing = self.section.dpo_beta, self.section.label_smoothing
        delta_of = {"": delta_NP.sum(0)} | {f"agent_{i}/": d for i, d in enumerate(delta_NP)}
        weight_P = batch.weight_P
        sums = Sums(pairs=float(weight_P.sum()))
        for prefix, delta_P in delta_of.items():
            loss_P = joint_dpo(delta_P, torch.zeros_like(delta_P), beta, smoothing)
            metrics = {"loss": loss_P, "margin": beta * delta_P, "accuracy": delta_P > 0}
            sums.add(**{f"{prefix}dpo/{name}": value * weight_P for name, value in metrics.items()})
        return sums

    def _means(self, sums: Sums) -> dict[str, float]:
        """Average over the pairs; also log the joint loss as ``loss``, as all trainers do."""
        means = sums.means("pairs")
        return means | {"loss": means["dpo/loss"]}
