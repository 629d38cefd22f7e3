"""MAGRPO: multi-agent group relative policy optimization (arXiv 2508.04652); GRPO with N = 1.

Objective of agent i, over the nodes of an update, with its G completions y_ig at a node:

    L_i = −(1/|nodes|) Σ_nodes w_t (1/G) Σ_g Â_ig Σ_tokens log π_i(token | …)
    Â_ig = R_ig − mean_g R_ig,   R_ig = mean of R_k over the joint actions k that contain y_ig
    R_k(t) = r_k + γ · mean over the joint returns of k's child

Departures from the paper: no division by the siblings' standard deviation unless asked for; no
importance ratio and no clip, as each sample is used once (strictly on-policy); with ``handoff``
the future's return is added to every joint action of a node (``comlrl/returns.py``);
``train_batch_size`` below the step's nodes makes several updates from one sampling, of like size
and each over its own |nodes|. The entropy that is logged is the estimate −log π of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from comlrl import distributed
from comlrl.advantages import sibling_advantages
from comlrl.batching import Row, like_parts
from comlrl.loop import Loop, Step, means
from comlrl.losses import k3_kl, policy_gradient
from comlrl.parallel import side_by_side
from comlrl.policy import action_logprobs
from comlrl.returns import agent_returns, joint_returns
from comlrl.rollout import Greedy, Rollout, Shape
from comlrl.team import Agent, Team
from comlrl.types import AgentTurn, NonFiniteError, Sampling, TokenBatch, Tree
from comlrl.update import accumulate, explained, optimizer_of
from trainers.configs import MAGRPOConfig

__all__ = ["MAGRPOConfig", "MAGRPOTrainer"]


@dataclass
class Sums:
    """One agent's sums over a step, for the log: of all its completions, whatever their advantage,
    and of its loss."""

    completions: float = 0
    zeros: float = 0  # of their advantages
    advantage: float = 0.0
    advantage_squared: float = 0.0
    tokens: float = 0
    logprob: float = 0.0  # of the tokens, under the policy that sampled them
    kl: float = 0.0  # of the tokens, k3
    loss: float = 0.0  # L_i of each update, times the update's nodes

    def add(self, other: Sums) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def told(self, nodes: int, kl: bool) -> dict[str, float]:
        """Metrics of the agent; ``nodes``: of the step."""
        count, tokens = max(1, self.completions), max(1, self.tokens)
        variance = self.advantage_squared / count - (self.advantage / count) ** 2
        told = {
            "loss": self.loss / max(1, nodes),
            "entropy": -self.logprob / tokens,
            "zero_advantage_share": self.zeros / count,
            "advantage_std": math.sqrt(max(0.0, variance)),
        }
        return told | ({"kl": self.kl / tokens} if kl else {})


class MAGRPOTrainer:
    """Grow trees, credit them, update every agent once; nothing else."""

    def __init__(
        self,
        section: MAGRPOConfig,
        team: Team,
        rollout: Rollout,
        loop: Loop,
        sampling: Sampling,
        tree_metrics: Callable[[Sequence[Tree]], dict[str, float]],
    ) -> None:
        self.section, self.team, self.rollout, self.loop = section, team, rollout, loop
        self.sampling, self.tree_metrics = sampling, tree_metrics
        self.shape = Shape(
            section.num_agents,
            section.num_turns,
            section.num_generations,
            section.joint_mode,
            section.handoff,
            section.early_termination_threshold,
        )
        self.optimizers = [
            optimizer_of(section, agent.parameters(), section.learning_rate)
            for agent in team.agents
        ]

    def train(self) -> None:
        for step in self.loop.steps(self):
            self._step(step)

    def _step(self, step: Step) -> None:
        trees, greedy = self._grow(step)
        step.clock.lap("rollout")
        sums_N = [Sums() for _ in self.team.agents]
        nodes = self._credit(trees, greedy, sums_N)
        parts = self._parts(trees, nodes)
        if len(parts) > 1 and step.index == 1 and distributed.is_main():
            print(
                f"notice: {len(parts)} updates from one sampling (train_batch_size="
                f"{self.section.train_batch_size}): not strictly on-policy"
            )
        scored = sum(len(node.scores_K) for tree in trees for node in tree.nodes) + greedy.scored
        env_steps = int(distributed.total(scored))
        span = self.loop.span(env_steps)
        norms_UN = [
            self._update(part, sums_N, span.at(u, len(parts))) for u, part in enumerate(parts)
        ]
        step.clock.lap("update")
        tokens = sum(node.tokens for tree in trees for node in tree.nodes) + greedy.tokens
        everyone = distributed.gather(trees)
        metrics = self._metrics(sums_N, norms_UN, sum(len(tree.nodes) for tree in everyone))
        self.loop.record(
            step,
            env_steps=env_steps,
            updates=len(parts),
            scored=env_steps,
            tokens=int(distributed.total(tokens)),
            metrics=self.tree_metrics(everyone) | metrics,
            trees=everyone,
        )

    def _metrics(
        self, sums_N: Sequence[Sums], norms_UN: Sequence[Sequence[float]], nodes: int
    ) -> dict[str, float]:
        """What the log wants beside the trees': of each agent, and the mean over the agents."""
        told_N = []
        for own, norms_U in zip(sums_N, zip(*norms_UN, strict=True), strict=True):
            everyone = Sums(**distributed.totals(asdict(own)))
            told = everyone.told(nodes, self.section.kl_coef > 0)
            told_N.append(told | {"gradient_norm": max(norms_U)})
        return means(told_N) | {"learning_rate": self.optimizers[0].learning_rate}

    def _grow(self, step: Step) -> tuple[list[Tree], Greedy]:
        tasks, key = distributed.share(step.tasks), ("train", step.index)
        if self.section.advantage != "greedy":
            return self.rollout.grow(tasks, self.shape, self.sampling, key), Greedy.none()
        return self.rollout.grow_with_greedy(
            tasks, self.shape, self.sampling, key, self.section.discount
        )

    def _credit(
        self, trees: Sequence[Tree], greedy: Greedy, sums_N: Sequence[Sums]
    ) -> list[list[Row | None]]:
        """For each node one row for each agent, weighted Â · w_t / G; None where Â is all zero."""
        weights = self.section.turn_gradient_weights or [1.0] * self.section.num_turns
        nodes: list[list[Row | None]] = []
        for b, tree in enumerate(trees):
            returns = joint_returns(tree, self.section.discount)
            for s, node in enumerate(tree.nodes):
                rows: list[Row | None] = []
                for turn, returns_G, sums in zip(
                    node.agents_N, agent_returns(node, returns[s]), sums_N, strict=True
                ):
                    advantages = sibling_advantages(
                        returns_G,
                        self.section.advantage,
                        normalize=self.section.advantage_normalization,
                        greedy_return=greedy.returns_BS[b][s] if greedy.returns_BS else None,
                    )
                    sums.add(_sums_of(turn, advantages))
                    scale = weights[node.turn - 1] / len(advantages)
                    ids = tuple(c.token_ids for c in turn.completions_G)
                    rows.append(self._row(turn.prompt_ids, ids, [scale * a for a in advantages]))
                nodes.append(rows)
        return nodes

    def _row(
        self, prompt: tuple[int, ...], ids: tuple[tuple[int, ...], ...], weights: Sequence[float]
    ) -> Row | None:
        """Completions without advantage have no gradient unless the KL gives them one."""
        keep = [g for g, w in enumerate(weights) if ids[g] and (w or self.section.kl_coef > 0)]
        if not keep:
            return None
        return Row(
            prompt,
            tuple(ids[g] for g in keep),
            tuple(weights[g] for g in keep),
            tuple(keep),
        )

    def _parts(
        self, trees: Sequence[Tree], nodes: Sequence[list[Row | None]]
    ) -> list[list[list[Row | None]]]:
        """This process's nodes of each update: those that one process alone would put there."""
        places, total = distributed.positions([len(tree.nodes) for tree in trees])
        own = dict(zip(places, nodes, strict=True))
        return [
            [own[place] for place in part if place in own]
            for part in like_parts(total, self.section.train_batch_size)
        ]

    def _update(
        self, nodes: Sequence[Sequence[Row | None]], sums_N: Sequence[Sums], progress: float
    ) -> list[float]:
        """One optimizer step of every agent on these nodes; each agent's gradient norm."""
        count = int(distributed.total(len(nodes)))
        jobs = [
            partial(self._gradients, index, [rows[index] for rows in nodes], count)
            for index in range(len(self.team))
        ]
        norms = []
        try:
            told_N = side_by_side(jobs, self.team.device, self.team.side_by_side)
            for sums, told in zip(sums_N, told_N, strict=True):
                sums.add(told)
            for optimizer in self.optimizers:
                norms.append(optimizer.step(progress))
        except NonFiniteError as error:
            at = getattr(error, "agent", len(norms))
            step = self.loop.counters.steps + 1
            raise explained(error, at, step, self.loop.run_dir) from error
        return norms

    def _gradients(self, index: int, rows: Sequence[Row | None], nodes: int) -> Sums:
        """The agent's gradients of L_i over an update of ``nodes`` nodes; sums for the log."""
        self.optimizers[index].zero()
        with self.team.acting(index) as agent:
            try:
                told = accumulate(
                    agent,
                    [row for row in rows if row is not None],
                    lambda batch: self._loss(agent, batch, nodes),
                    concurrent=self.team.side_by_side,
                )
            except NonFiniteError as error:
                error.agent = index  # type: ignore[attr-defined]
                raise
        sums = Sums()
        for of_batch in told:
            sums.add(of_batch)
        return sums

    def _loss(self, agent: Agent, batch: TokenBatch, nodes: int) -> tuple[torch.Tensor, Sums]:
        """This micro-batch's part of L_i (a sum over its rows), and its sums for the log."""
        said = action_logprobs(agent, batch, self.sampling.temperature)
        mask = batch.action_mask_RL
        weight_A = batch.weight_RL[mask].to(said.logprob_A.device, said.logprob_A.dtype)
        loss, sums = policy_gradient(said.logprob_A, weight_A / nodes), Sums()
        if self.section.kl_coef > 0:
            with torch.no_grad(), self.team.reference(agent.index) as reference:
                before = action_logprobs(reference, batch, self.sampling.temperature).logprob_A
            kl_A = k3_kl(said.logprob_A, before)
            loss = loss + self.section.kl_coef * kl_A.sum() / (nodes * self.section.num_generations)
            sums.kl = float(kl_A.detach().sum())
        sums.loss = nodes * float(loss.detach())
        return loss, sums

    def state(self) -> dict[str, Any]:
        return {}

    def state_tensors(self) -> dict[str, Mapping[str, torch.Tensor]]:
        return self.team.state_tensors() | {
            f"optimizer_{i}": optimizer.state_tensors()
            for i, optimizer in enumerate(self.optimizers)
        }

    def load(
        self, state: Mapping[str, Any], tensors: Mapping[str, dict[str, torch.Tensor]]
    ) -> None:
        self.team.load_tensors(tensors)
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_tensors(tensors[f"optimizer_{i}"])


def _sums_of(turn: AgentTurn, advantages: Sequence[float]) -> Sums:
    """What an agent's completions at a node add to the log."""
    said = turn.completions_G
    return Sums(
        completions=len(said),
        zeros=sum(a == 0 for a in advantages),
        advantage=sum(advantages),
        advantage_squared=sum(a * a for a in advantages),
        tokens=sum(len(c.token_ids) for c in said),
        logprob=sum(c.logprob for c in said),
    )
