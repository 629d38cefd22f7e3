"""MAGRPO: multi-agent group relative policy optimization (arXiv 2508.04652); GRPO with N = 1.

Objective of agent i, over the nodes of an update, with its G completions y_ig at a node:

    L_i = −(1/|nodes|) Σ_nodes w_t (1/G) Σ_g Â_ig Σ_tokens log π_i(token | …)
    Â_ig = R_ig − mean_g R_ig,   R_ig = mean of R_k over the joint actions k that contain y_ig
    R_k(t) = r_k + γ · mean over the joint returns of k's child

Where each agent has its own reward (``Score.by_agent``), r_k and R_k are agent i's.

Its nodes are those at which it acts: with ``turn_order: simultaneous`` all of them. With
``sequential`` (the grouping of AT-GRPO, arXiv 2510.11062) siblings share agent, turn and what
was written before them; r_k is 0 and γ is 1 up to the turn's last agent, so that R_k of an earlier
agent is the mean reward below its completion: its expected gradient is that of the team's reward.

With ``update_epochs`` above 1 a step's nodes are gone over as often, and Â log π becomes PPO's
min(ρ Â, clip(ρ, 1 ± ε) Â), ρ = π_i / π_i,old token by token (arXiv 1707.06347, eq. 7). π_old is the
policy that sampled, read by the first pass itself, so that the first update's ratios are exactly
1 and its gradient is L_i's.

``entropy_coef`` c_H > 0 adds a bonus for the entropy H of the distribution (after temperature and
truncation) from which each token was drawn, summed over a completion's tokens as log π is:

    L_i −= c_H (1/|nodes|) Σ_nodes (1/G) Σ_g Σ_tokens H(π_i(· | …))

H is differentiated where it was reached; its advantage does not count that an action leads to
states of more entropy. For completions of one token this is the gradient of c_H · H exactly.

With ``refill`` > 0, tasks whose returns are equal among all siblings are left out of an update, and
as many further tasks are sampled in their place, at most ``refill`` times (dynamic sampling, DAPO,
arXiv 2503.14476). Tasks that the policy always or never solves then weigh less than in the data.

Departures from the paper: no division by the siblings' standard deviation unless asked for; no
importance ratio and no clip where each sample is used once (strictly on-policy); with ``handoff``
joint actions without a child are credited with the mean future of those that have one, which are
weighted by how many they are (``comlrl/credit/returns.py``);
``train_batch_size`` below the step's nodes makes several updates of a pass, of like size and each
over its own |nodes|; a sequential turn is never divided. The entropy that is logged is the
estimate −log π of the samples, with ``entropy_coef`` H itself.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from comlrl.config.algorithms import MAGRPOConfig
from comlrl.credit.advantages import sibling_advantages
from comlrl.credit.episodes import call_advantages, call_rows
from comlrl.credit.returns import completion_returns, joint_returns_of_agents
from comlrl.errors import notice
from comlrl.loop.loop import Loop
from comlrl.loop.parts import Part
from comlrl.loop.steps import Step
from comlrl.models.agent import Agent
from comlrl.models.logprobs import ActionLogprobs, action_logprobs
from comlrl.models.team import Team
from comlrl.processes.statistics import Sums, agent_means
from comlrl.programs.rollout import GreedyEpisodes, ProgramRollout
from comlrl.rollout.grow import Greedy, Rollout
from comlrl.types import (
    AgentTurn,
    Completion,
    Episode,
    EpisodeGroup,
    RolloutResult,
    Row,
    Sampling,
    TokenBatch,
    Tree,
)
from comlrl.update.accumulate import accumulate
from comlrl.update.clipped import ratio_sums
from comlrl.update.losses import clipped_policy, k3_kl, policy_gradient
from comlrl.update.minibatches import like_parts
from comlrl.update.old_logprobs import OldLogprobs
from comlrl.update.optimizer import policy_optimizer
from comlrl.update.worker_threads import run_parallel

# Of a turn from one state on, for each agent a row for each node at which it acts; None where
# nothing is to be learned there.
TurnRows = list[list[Row | None]]


@dataclass(frozen=True, slots=True)
class Unit:
    """What is never divided among updates: a turn from one state on, or a task's episodes."""

    rows_N: list[list[Row]]
    nodes_N: list[int]  # over which the agents' losses are averaged

    @classmethod
    def of_turn(cls, rows: TurnRows) -> Unit:
        learned = [[row for row in own if row is not None] for own in rows]
        return cls(learned, [len(own) for own in rows])


class MAGRPOTrainer:
    """Grow trees, credit them, update every agent; nothing else."""

    def __init__(
        self,
        section: MAGRPOConfig,
        team: Team,
        rollout: Rollout | ProgramRollout,
        loop: Loop,
        sampling: Sampling,
    ) -> None:
        self.section, self.team, self.rollout, self.loop = section, team, rollout, loop
        self.sampling = sampling
        self.refill = 0 if section.advantage in ("raw", "greedy") else section.refill
        self.optimizers = [policy_optimizer(section, team, i) for i in range(len(team))]

    def train(self) -> None:
        for step in self.loop.steps(self):
            self.step(step)

    def parts(self) -> Mapping[str, Part]:
        optimizers = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}
        return self.team.parts() | optimizers

    def step(self, step: Step) -> None:
        """Grow, credit, update, record."""
        trees, greedy = self._grow(step)
        if self.refill:
            step, trees = self._refill(step, trees)
        gathered = self.loop.gather(step, trees, greedy)
        sums_N = [Sums() for _ in self.team.agents]
        parts = self._parts(self._learned(trees, self._credit(trees, greedy, sums_N)))
        if len(parts) > 1 and not self.section.takes_ratios and step.index == 1:
            notice(
                f"{len(parts)} updates from one sampling (train_batch_size="
                f"{self.section.train_batch_size}): not strictly on-policy"
            )
        old_N = [
            OldLogprobs(self.team, agent, partial(self._logprobs, agent), self._logprobs)
            for agent in self.team.agents
        ]
        if self.section.takes_ratios:
            self._measure(parts[1:], old_N)
        updates = parts * self.section.update_epochs
        norms_UN = [
            self._update(part, old_N, sums_N, gathered.span.at(u, len(updates)))
            for u, part in enumerate(updates)
        ]
        nodes = sum((tree.nodes_N for tree in gathered.trees), Counter())
        metrics = self._metrics(sums_N, norms_UN, nodes)
        self.loop.record(step, gathered, updates=len(updates), metrics=metrics)

    def _metrics(
        self, sums_N: Sequence[Sums], norms_UN: Sequence[Sequence[float]], nodes: Mapping[int, int]
    ) -> dict[str, float]:
        """What the log wants beside the trees': of each agent, and the mean over the agents."""
        metrics_N, passes = [], self.section.update_epochs
        for i, (sums, norms_U) in enumerate(zip(sums_N, zip(*norms_UN, strict=True), strict=True)):
            whole = sums.all_reduced(self.team.processes)
            of = whole.of
            count, tokens = max(1, of["completions"]), max(1, of["tokens"])
            variance = of["advantage_squared"] / count - (of["advantage"] / count) ** 2
            metrics = {
                "loss": of["loss"] / max(1, nodes[i] * passes),
                "entropy": -of["logprob"] / tokens,
                "zero_advantage_share": of["zeros"] / count,
                "advantage_std": math.sqrt(max(0.0, variance)),
            }
            if self.section.entropy_coef > 0:
                metrics["entropy"] = of["entropy"] / (tokens * passes)
            if self.section.kl_coef > 0:
                metrics["kl"] = of["kl"] / (tokens * passes)
            if self.section.takes_ratios:
                ratios = of["ratios"] or math.nan  # none where all returns are equal
                metrics |= {name: of[name] / ratios for name in ("clip_fraction", "approx_kl")}
                metrics["ratio_max"] = whole.maxima.get("ratio_max", math.nan)
            metrics_N.append(metrics | {"gradient_norm": max(norms_U)})
        return agent_means(metrics_N) | {"learning_rate": self.optimizers[0].learning_rate}

    def _grow(self, step: Step) -> tuple[Sequence[RolloutResult], Greedy | GreedyEpisodes | None]:
        tasks, key = self.team.processes.shard(step.tasks), step.key
        if self.section.advantage != "greedy":
            return self.rollout.grow(tasks, self.section.shape, self.sampling, key), None
        return self.rollout.grow_with_greedy(
            tasks, self.section.shape, self.sampling, key, self.section.discount
        )

    def _refill(
        self, step: Step, trees: Sequence[RolloutResult]
    ) -> tuple[Step, list[RolloutResult]]:
        """Sample further tasks until as many as the step has differ in their siblings' returns.

        Which tasks follows from the seed and the step alone, so that a resumed run has the same.
        """
        trees, tasks = list(trees), list(step.tasks)
        spares = self.loop.schedule.spares(step.index - 1)
        for _ in range(self.refill):
            missing = len(step.tasks) - self._different(trees)
            further, spares = spares[:missing], spares[missing:]
            if not further:
                break
            tasks += further
            mine = self.team.processes.shard(tasks)[len(trees) :]
            trees += self.rollout.grow(mine, self.section.shape, self.sampling, step.key)
        return replace(step, tasks=tasks), trees

    def _different(self, trees: Sequence[RolloutResult]) -> int:
        """Return how many tasks, of all processes, have siblings with different returns."""
        count = sum(map(self._differs, trees))
        return int(self.team.processes.all_reduce_counts({"different": count})["different"])

    def _differs(self, tree: RolloutResult) -> bool:
        sums_N = [Sums() for _ in self.team.agents]
        self._credit([tree], None, sums_N)
        return any(sums.of["zeros"] < sums.of["completions"] for sums in sums_N)

    def _learned(
        self, trees: Sequence[RolloutResult], credited: list[list[Unit]]
    ) -> list[list[Unit]]:
        """Leave out what ``refill`` has replaced, unless nothing would be left."""
        if not self.refill or not self._different(trees):
            return credited
        return [
            units if self._differs(tree) else []
            for tree, units in zip(trees, credited, strict=True)
        ]

    def _credit(
        self,
        trees: Sequence[RolloutResult],
        greedy: Greedy | GreedyEpisodes | None,
        sums_N: Sequence[Sums],
    ) -> list[list[Unit]]:
        """The units of each task; ``sums_N`` take what the log wants of the agents' samples."""
        credited, numbers = [], itertools.count()
        for b, tree in enumerate(trees):
            if isinstance(tree, EpisodeGroup):
                episode = None
                if isinstance(greedy, GreedyEpisodes):
                    episode = greedy.groups[b].episodes_G[0]
                credited.append([self._credit_episodes(tree, episode, sums_N, numbers)])
            else:
                baseline_SN = greedy.returns_BSN[b] if isinstance(greedy, Greedy) else None
                credited.append(self._credit_tree(tree, baseline_SN, sums_N, numbers))
        return credited

    def _credit_tree(
        self,
        tree: Tree,
        baseline_SN: Sequence[Sequence[float]] | None,
        sums_N: Sequence[Sums],
        numbers: Iterator[int],
    ) -> list[Unit]:
        """The rows of a tree's turns, weighted Â · w_t / G. ``baseline_SN``: greedy returns from
        each node on, where the advantage asks for them."""
        section, starts = self.section, tree.turn_starts()
        returns_NS = joint_returns_of_agents(tree, section.discount)
        turns: dict[int, TurnRows] = {start: [[] for _ in sums_N] for start in starts}
        for s, node in enumerate(tree.nodes):
            for agent, turn in zip(node.acting, node.agents_N, strict=True):
                advantages = sibling_advantages(
                    completion_returns(node, agent, returns_NS[agent][s]),
                    section.advantage,
                    normalize=section.advantage_normalization,
                    greedy_return=None if baseline_SN is None else baseline_SN[s][agent],
                )
                sums_N[agent].absorb(_sums_of(turn.completions_G, advantages))
                scale = section.weight_T[node.turn - 1] / len(advantages)
                row = self._row(turn, [scale * a for a in advantages], numbers)
                turns[starts[s]][agent].append(row)
        return [Unit.of_turn(rows) for rows in turns.values()]

    def _credit_episodes(
        self,
        group: EpisodeGroup,
        greedy: Episode | None,
        sums_N: Sequence[Sums],
        numbers: Iterator[int],
    ) -> Unit:
        """The rows of a task's episodes: each agent's calls, weighted Â / G."""
        always = self.section.kl_coef > 0 or self.section.entropy_coef > 0
        scale, rows_N = 1.0 / len(group.episodes_G), []
        for agent, sums in enumerate(sums_N):
            advantages_G = call_advantages(
                group,
                agent,
                self.section.advantage,
                discount=self.section.discount,
                normalize=self.section.advantage_normalization,
                greedy=greedy,
            )
            calls = [call for episode in group.episodes_G for call in episode.calls_of(agent)]
            advantages = list(itertools.chain(*advantages_G))
            sums.absorb(_sums_of([call.completion for call in calls], advantages))
            weighted = [
                (call, scale * advantage, next(numbers))
                for call, advantage in zip(calls, advantages, strict=True)
                if call.completion.token_ids and (advantage or always)
            ]
            rows_N.append(call_rows(weighted))
        return Unit(rows_N, [1] * len(sums_N))

    def _row(self, turn: AgentTurn, weights: Sequence[float], numbers: Iterator[int]) -> Row | None:
        """Completions without advantage have no gradient unless KL or entropy gives them one.

        ``numbers``: one for each completion of the step.
        """
        completions_G, always = (
            turn.completions_G,
            self.section.kl_coef > 0 or self.section.entropy_coef > 0,
        )
        keep = [g for g, w in enumerate(weights) if completions_G[g].token_ids and (w or always)]
        if not keep:
            return None
        return Row.of(
            turn.prompt_ids,
            [completions_G[g] for g in keep],
            (weights[g] for g in keep),
            itertools.islice(numbers, len(keep)),
        )

    def _parts(self, credited: Sequence[Sequence[Unit]]) -> list[list[Unit]]:
        """This process's turns of each update: those that one process alone would put there."""
        places, total = self.team.processes.shard_positions([len(turns) for turns in credited])
        own = dict(zip(places, itertools.chain(*credited), strict=True))
        return [
            [own[place] for place in part if place in own]
            for part in like_parts(total, self.section.train_batch_size)
        ]

    def _measure(self, parts: Sequence[Sequence[Unit]], old_N: Sequence[OldLogprobs]) -> None:
        """Old log-probabilities of what other nodes' updates come before, batched as there."""

        def measure(index: int) -> None:
            with self.team.acting(index):
                for part in parts:
                    old_N[index].measure(_rows_of(part, index))

        jobs = [partial(measure, index) for index in range(len(self.team))]
        run_parallel(jobs, self.team.device, self.team.run_parallel)

    def _logprobs(self, agent: Agent, batch: TokenBatch) -> ActionLogprobs:
        temperature = self.sampling.of(agent.index).temperature
        return action_logprobs(agent, batch, temperature, entropy=self.section.entropy_coef > 0)

    def _update(
        self,
        turns: Sequence[Unit],
        old_N: Sequence[OldLogprobs],
        sums_N: Sequence[Sums],
        progress: float,
    ) -> list[float]:
        """One optimizer step of every agent on these turns; each agent's gradient norm."""
        own = {i: sum(turn.nodes_N[i] for turn in turns) for i in range(len(old_N))}
        nodes = self.team.processes.all_reduce_counts(own)
        jobs = [
            partial(self._gradients, i, _rows_of(turns, i), int(nodes[i]), old)
            for i, old in enumerate(old_N)
        ]
        for sums, found in zip(
            sums_N, run_parallel(jobs, self.team.device, self.team.run_parallel), strict=True
        ):
            sums.absorb(found)
        return [optimizer.step(progress) for optimizer in self.optimizers]

    def _gradients(self, index: int, rows: Sequence[Row], nodes: int, old: OldLogprobs) -> Sums:
        """The agent's gradients of L_i over an update of ``nodes`` nodes; sums for the log."""
        sums = Sums()
        self.optimizers[index].zero()
        with self.team.acting(index) as agent:
            accumulate(
                agent,
                rows,
                lambda batch: self._loss(agent, batch, nodes, old),
                sums,
                concurrent=self.team.run_parallel,
            )
        return sums

    def _loss(
        self, agent: Agent, batch: TokenBatch, nodes: int, old: OldLogprobs
    ) -> tuple[torch.Tensor, Sums]:
        """This micro-batch's part of L_i (a sum over its rows), and its sums for the log."""
        section, logprobs, sums = self.section, self._logprobs(agent, batch), Sums()
        logprob_A, count = logprobs.logprob_A, section.shape.generations(agent.index)
        weight_A = batch.weight_RL[batch.action_mask_RL].to(logprob_A.device, logprob_A.dtype)
        if self.section.takes_ratios:
            old_A = old.of_policy(batch, logprob_A)
            loss = clipped_policy(logprob_A, old_A, weight_A / nodes, section.clip_range).sum()
            sums.add(ratios=len(logprob_A))
            sums.absorb(ratio_sums(logprob_A, old_A, section.clip_range))
        else:
            loss = policy_gradient(logprob_A, weight_A / nodes)
        if section.kl_coef > 0:
            kl_A = k3_kl(logprob_A, old.of_reference(batch))
            loss = loss + section.kl_coef * batch.corrected(kl_A).sum() / (nodes * count)
            sums.add(kl=kl_A)
        if logprobs.entropy_A is not None:
            entropy = batch.corrected(logprobs.entropy_A).sum()
            loss = loss - section.entropy_coef * entropy / (nodes * count)
            sums.add(entropy=logprobs.entropy_A)
        sums.add(loss=nodes * float(loss.detach()))
        return loss, sums


def _rows_of(turns: Sequence[Unit], index: int) -> list[Row]:
    """An agent's, of the nodes that teach it something."""
    return [row for turn in turns for row in turn.rows_N[index]]


def _sums_of(completions_G: Sequence[Completion], advantages: Sequence[float]) -> Sums:
    """What an agent's completions at a node add to the log."""
    return Sums(
        completions=len(completions_G),
        zeros=sum(a == 0 for a in advantages),
        advantage=sum(advantages),
        advantage_squared=sum(a * a for a in advantages),
        tokens=sum(len(c.token_ids) for c in completions_G),
        logprob=sum(c.logprob for c in completions_G),
    )
