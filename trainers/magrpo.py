"""MAGRPO: multi-agent group relative policy optimization (arXiv 2508.04652); GRPO with N = 1.

Objective of agent i, over the nodes of an update, with its G completions y_ig at a node:

    L_i = −(1/|nodes|) Σ_nodes w_t (1/G) Σ_g Â_ig Σ_tokens log π_i(token | …)
    Â_ig = R_ig − mean_g R_ig,   R_ig = mean of R_k over the joint actions k that contain y_ig
    R_k(t) = r_k + γ · mean over the joint returns of k's child

Departures from the paper: no division by the siblings' standard deviation unless asked for; no
importance ratio and no clip, as each sample is used once (strictly on-policy); with ``handoff``
the future's return is added to every joint action of a node (``comlrl/returns.py``);
``train_batch_size`` below the step's nodes makes several updates from one sampling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from comlrl import distributed
from comlrl.advantages import sibling_advantages
from comlrl.batching import Row
from comlrl.loop import Loop, Step
from comlrl.losses import k3_kl, policy_gradient
from comlrl.parallel import side_by_side
from comlrl.policy import action_logprobs
from comlrl.returns import agent_returns, joint_returns
from comlrl.rollout import Rollout, Shape
from comlrl.team import Agent, Team
from comlrl.types import NonFiniteError, Sampling, TokenBatch, Tree
from comlrl.update import AgentOptimizer, accumulate, explained
from trainers.configs import MAGRPOConfig

__all__ = ["MAGRPOConfig", "MAGRPOTrainer"]


@dataclass
class Sums:
    """Sums of a step over this process's action tokens and advantages, for the log."""

    tokens: float = 0
    logprob: float = 0.0
    kl: float = 0.0
    loss: float = 0.0
    zeros: float = 0  # advantages that are 0
    advantages: float = 0

    def add(self, other: Sums) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


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
            AgentOptimizer(
                agent.parameters(),
                section.learning_rate,
                max_grad_norm=section.max_grad_norm,
                schedule=section.lr_scheduler,
                warmup=section.warmup_steps,
                total=loop.total_steps,
            )
            for agent in team.agents
        ]

    def train(self) -> None:
        for step in self.loop.steps(self):
            self._step(step)

    def _step(self, step: Step) -> None:
        started = time.monotonic()
        trees, greedy = self._grow(step)
        grown = time.monotonic()
        sums = Sums()
        nodes = self._credit(trees, greedy, sums)
        batches = self._update_batches(trees, nodes)
        if len(batches) > 1 and step.index == 1 and distributed.is_main():
            print(
                f"notice: {len(batches)} updates from one sampling (train_batch_size="
                f"{self.section.train_batch_size}): not strictly on-policy"
            )
        norms = [norm for batch in batches for norm in self._update(batch, sums)]
        ended = time.monotonic()
        scored = sum(len(node.scores_K) for tree in trees for node in tree.nodes)
        tokens = sum(
            len(completion.token_ids)
            for tree in trees
            for node in tree.nodes
            for turn in node.agents_N
            for completion in turn.completions_G
        )
        everyone = distributed.gather(trees)
        env_steps = int(distributed.total(scored))
        all_tokens = int(distributed.total(tokens))
        sums = Sums(**distributed.totals(asdict(sums)))
        metrics = self.tree_metrics(everyone) | {
            "loss": sums.loss,
            "entropy": -sums.logprob / max(1, sums.tokens),
            "gradient_norm": max(norms, default=0.0),
            "learning_rate": self.optimizers[0].learning_rate,
            "zero_advantage_share": sums.zeros / max(1, sums.advantages),
            "joint_actions_per_second": env_steps / (ended - started),
            "tokens_per_second": all_tokens / (ended - started),
            "time/rollout_share": (grown - started) / (ended - started),
            "time/update_share": (ended - grown) / (ended - started),
        }
        if self.section.kl_coef > 0:
            metrics["kl"] = sums.kl / max(1, sums.tokens)
        self.loop.record(
            step,
            env_steps=env_steps,
            updates=len(batches),
            scored=env_steps,
            tokens=all_tokens,
            metrics=metrics,
            trees=everyone,
        )

    def _grow(self, step: Step) -> tuple[list[Tree], list[list[float]] | None]:
        tasks, key = distributed.share(step.tasks), ("train", step.index)
        if self.section.advantage != "greedy":
            return self.rollout.grow(tasks, self.shape, self.sampling, key), None
        return self.rollout.grow_with_greedy(
            tasks, self.shape, self.sampling, key, self.section.discount
        )

    def _credit(
        self, trees: Sequence[Tree], greedy: list[list[float]] | None, sums: Sums
    ) -> list[list[Row | None]]:
        """For each node one row for each agent, weighted Â · w_t / G; None where Â is all zero."""
        weights = self.section.turn_gradient_weights or [1.0] * self.section.num_turns
        nodes: list[list[Row | None]] = []
        for tree_index, tree in enumerate(trees):
            returns = joint_returns(tree, self.section.discount)
            for index, node in enumerate(tree.nodes):
                rows: list[Row | None] = []
                for turn, returns_G in zip(
                    node.agents_N, agent_returns(node, returns[index]), strict=True
                ):
                    advantages = sibling_advantages(
                        returns_G,
                        self.section.advantage,
                        normalize=self.section.advantage_normalization,
                        greedy_return=None if greedy is None else greedy[tree_index][index],
                    )
                    scale = weights[node.turn - 1] / len(advantages)
                    sums.zeros += sum(a == 0 for a in advantages)
                    sums.advantages += len(advantages)
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

    def _update_batches(
        self, trees: Sequence[Tree], nodes: Sequence[list[Row | None]]
    ) -> list[list[list[Row | None]]]:
        """This process's nodes of each update: those that one process alone would put there."""
        places, total = distributed.positions([len(tree.nodes) for tree in trees])
        size = min(self.section.train_batch_size or total, total)
        batches: list[list[list[Row | None]]] = [[] for _ in range(-(-total // size))]
        for place, node in zip(places, nodes, strict=True):
            batches[place // size].append(node)
        return batches

    def _update(self, nodes: Sequence[Sequence[Row | None]], sums: Sums) -> list[float]:
        """One optimizer step of every agent on these nodes; each agent's gradient norm."""
        count = int(distributed.total(len(nodes)))
        jobs = [
            partial(self._gradients, index, [rows[index] for rows in nodes], count)
            for index in range(len(self.team))
        ]
        norms = []
        try:
            for own in side_by_side(jobs, self.team.device, self.team.side_by_side):
                sums.add(own)
            for optimizer in self.optimizers:
                norms.append(optimizer.step())
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
        loss = policy_gradient(said.logprob_A, weight_A / nodes)
        sums = Sums(len(said.logprob_A), float(said.logprob_A.detach().sum()))
        if self.section.kl_coef > 0:
            with torch.no_grad(), self.team.reference(agent.index) as reference:
                before = action_logprobs(reference, batch, self.sampling.temperature).logprob_A
            kl_A = k3_kl(said.logprob_A, before)
            loss = loss + self.section.kl_coef * kl_A.sum() / (nodes * self.section.num_generations)
            sums.kl = float(kl_A.detach().sum())
        sums.loss = float(loss.detach())
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
