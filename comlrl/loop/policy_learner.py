"""A base for algorithms that learn from one number for each decision, such as MAGRPO and most
custom algorithms."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from comlrl.config.algorithms import MAGRPOConfig
from comlrl.credit.decisions import Decisions, decisions_of
from comlrl.errors import notice
from comlrl.loop.loop import Loop
from comlrl.loop.parts import Part, Player
from comlrl.loop.steps import Rolled, Step
from comlrl.models.agent import Agent
from comlrl.models.logprobs import ActionLogprobs, action_logprobs
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.processes.distributed import Deal
from comlrl.processes.statistics import Sums, agent_means
from comlrl.types import RolloutResult, Row, Sampling, TokenBatch
from comlrl.update.minibatches import like_parts
from comlrl.update.optimizer import policy_optimizer
from comlrl.update.per_token import PerToken
from comlrl.update.policy_update import PolicyUpdate
from comlrl.update.worker_threads import run_parallel


class PolicyLearner:
    """A base for algorithms that define ``credit`` and, optionally, ``loss``.

    Agent i's loss is averaged over nodes with G completions each; completions with credit 0 are
    skipped, unless an entropy bonus or a KL term gives them a gradient:

        L_i = (1/(|nodes| G)) Σ_a loss_a

    Units (a turn from one state on, or a task's episodes) are divided into updates of
    ``train_batch_size`` units, repeated for ``update_epochs`` epochs.
    """

    def __init__(
        self,
        section: MAGRPOConfig,
        team: Team,
        rollout: Player,
        loop: Loop,
        sampling: Sampling,
    ) -> None:
        self.section, self.team, self.rollout, self.loop = section, team, rollout, loop
        self.sampling = sampling
        self.refill = 0 if section.advantage in ("raw", "greedy") else section.refill
        # one for each trained agent
        self.optimizers = [policy_optimizer(section, team, i) for i in team.trained]

    def train(self) -> None:
        self.loop.train(self)

    def parts(self) -> Mapping[str, Part]:
        """Return the parts that a checkpoint stores."""
        optimizers = zip(self.team.trained, self.optimizers, strict=True)
        return self.team.parts() | {f"optimizer_{i}": optimizer for i, optimizer in optimizers}

    def refilled(
        self, step: Step, trees: Sequence[RolloutResult]
    ) -> tuple[Step, Sequence[RolloutResult]]:
        """Sample additional tasks, at most ``refill`` times, until as many as the step had have a
        nonzero credit.

        They depend only on the seed and the step, so that a resumed run samples the same.
        """
        trees, wanted = list(trees), len(step.tasks)
        spares = self.loop.schedule.spares(step.index - 1) if self.refill else []
        for _ in range(self.refill):
            live = sum(self._teaches(step, tree) for tree in trees)
            missing = wanted - int(distributed.total(live))
            further, spares = spares[:missing], spares[missing:]
            if not further:
                break
            deal, shape = self.loop.deal(further), self.section.shape
            trees += self.rollout.grow(deal.shard(further), shape, self.sampling, step.key)
            deal = Deal(step.deal.ranks + deal.ranks)
            step = replace(step, tasks=[*step.tasks, *further], deal=deal)
        return step, trees

    def _teaches(self, step: Step, tree: RolloutResult) -> bool:
        section, span = self.section, self.loop.span(0)
        decisions = decisions_of([tree], section.discount, section.leniency(span.start))
        rolled = Rolled(decisions=decisions, index=step.index, deal=Deal((0,)), span=span, scored=0)
        return any(self._trained_credit(decisions, self.credit(rolled)))

    def _trained_credit(self, decisions: Decisions, credit_D: Sequence[float]) -> list[float]:
        """Return the credit, with 0 for decisions of untrained agents."""
        pairs = zip(decisions.numbered, credit_D, strict=True)
        return [credit if self.team.actor(d.agent).trained else 0.0 for d, credit in pairs]

    def credit(self, rolled: Rolled) -> list[float]:
        """Return the advantage of each decision, which weights its log-probability's gradient."""
        raise NotImplementedError

    def loss(
        self, update: PolicyUpdate, batch: TokenBatch, policy: ActionLogprobs, sums: Sums
    ) -> torch.Tensor:
        """Compute the loss of each token, shape (A,), and add statistics to ``sums``."""
        return update.loss(batch, policy, sums)

    def learn(self, rolled: Rolled, credit_D: Sequence[float]) -> dict[str, float]:
        """Update every agent; return metrics of each agent, and their means over the agents."""
        section, decisions, agents = self.section, rolled.decisions, range(len(self.team))
        trained, credit_D = self.team.trained, self._trained_credit(decisions, credit_D)
        parts = self._parts(rolled, credit_D)
        if len(parts) > 1 and not section.takes_ratios and rolled.index == 1:
            notice(
                f"{len(parts)} updates from one sampling (train_batch_size="
                f"{section.train_batch_size}): not strictly on-policy"
            )
        rows_UN = self._rows(decisions, credit_D)
        policies = {
            i: self._policy(
                self.team.agents[i], [row for rows_N in rows_UN for row in rows_N[i]], credit_D
            )
            for i in trained
        }
        rows_PN = [[[r for u in part for r in rows_UN[u][i]] for i in agents] for part in parts]
        if section.takes_ratios:  # measure before the weights change, batched as in the updates
            self._each(lambda i: policies[i].measure([rows_N[i] for rows_N in rows_PN[1:]]))
        learned = {unit for part in parts for unit in part}
        sums_N, norms_UN = [_credit_sums(decisions, credit_D, i, learned) for i in agents], []
        updates = list(zip(parts, rows_PN, strict=True)) * section.update_epochs
        for u, (part, rows_N) in enumerate(updates):
            nodes = sum((decisions.nodes_U[unit] for unit in part), Counter[int]())
            progress = rolled.span.at(u, len(updates))
            norms_UN.append(self._update(policies, rows_N, nodes, sums_N, progress))
        metrics_N: list[dict[str, float]] = [{} for _ in agents]
        for place, i in enumerate(trained):
            norms = [norms_U[place] for norms_U in norms_UN]
            sums = sums_N[i].all_reduced()
            metrics_N[i] = self._metrics(i, sums) | {"gradient_norm": max(norms)}
        ends = {"learning_rate": self.optimizers[0].learning_rate, "updates": float(len(updates))}
        return agent_means(metrics_N) | ends

    def _update(
        self,
        policies: Mapping[int, PolicyUpdate],
        rows_N: Sequence[Sequence[Row]],
        nodes: Mapping[int, int],
        sums_N: Sequence[Sums],
        progress: float,
    ) -> list[float]:
        """Make one optimizer step for every trained agent; return their gradient norms. ``nodes``:
        number of each agent's nodes in this process."""
        counts = {i: nodes[i] for i in policies}
        optimizers = dict(zip(policies, self.optimizers, strict=True))
        of_team = distributed.all_reduce_counts(counts)

        def gradients(i: int) -> None:
            completions = int(of_team[i]) * self.section.shape.generations(i)
            loss = partial(self.loss, policies[i])
            policies[i].gradients(rows_N[i], [optimizers[i]], completions, sums_N[i], loss)

        self._each(gradients)
        return [optimizer.step(progress) for optimizer in self.optimizers]

    def _each(self, work: Callable[[int], None]) -> None:
        """Call ``work`` with each trained agent's index, inside ``Team.acting``."""

        def run(index: int) -> None:
            with self.team.acting(index):
                work(index)

        jobs = [partial(run, index) for index in self.team.trained]
        run_parallel(jobs, self.team.device, self.team.run_parallel)

    def _parts(self, rolled: Rolled, credit_D: Sequence[float]) -> list[list[int]]:
        """Return this process's units for each update, divided as a single process would.

        With ``refill``, tasks without credit are left out, unless no task would remain.
        """
        decisions = rolled.decisions
        numbers = iter(range(len(decisions.nodes_U)))
        units_B = [[next(numbers) for _ in range(count)] for count in decisions.units_B]
        if self.refill:
            live = {d.unit for d, c in zip(decisions.numbered, credit_D, strict=True) if c}
            live_B = [units if live.intersection(units) else [] for units in units_B]
            units_B = live_B if distributed.total(sum(map(len, live_B))) else units_B
        places, total = rolled.deal.positions([len(units) for units in units_B])
        unit_at = dict(zip(places, itertools.chain(*units_B), strict=True))
        return [
            [unit_at[place] for place in part if place in unit_at]
            for part in like_parts(total, self.section.train_batch_size)
        ]

    def _rows(self, decisions: Decisions, credit_D: Sequence[float]) -> list[list[list[Row]]]:
        """Return the rows of decisions that have a gradient, for each unit and agent."""
        always = self.section.kl_coef > 0 or self.section.entropy_coef > 0
        rows_UN: list[list[list[Row]]] = []
        for of_nodes in decisions.of_unit():
            rows_UN.append([[] for _ in self.team.agents])
            for (agent, _), numbers in of_nodes.items():
                if agent not in self.team.trained:
                    continue
                learned = [
                    n for n in numbers
                    if decisions[n].completion.token_ids and (credit_D[n] or always)
                ]  # fmt: skip
                rows_UN[-1][agent] += decisions.packed(learned, self.section.weight_T)
        return rows_UN

    def _policy(self, agent: Agent, rows: Sequence[Row], credit_D: Sequence[float]) -> PolicyUpdate:
        section, temperature = self.section, self.sampling.for_agent(agent.index).temperature
        read = partial(action_logprobs, temperature=temperature, entropy=section.entropy_coef > 0)
        policy = PolicyUpdate(
            section, self.team, agent, partial(read, agent), read, section.kl_coef
        )
        credit = PerToken()
        for number in (number for row in rows for number in row.indices):
            value = torch.tensor([credit_D[number]], dtype=torch.float64)
            credit.of_completion[number] = value
        policy.credit(credit, rows)
        return policy

    def _metrics(self, index: int, sums: Sums) -> dict[str, float]:
        """Return an agent's metrics. ``sums``: over all processes."""
        totals, section, passes = sums.totals, self.section, self.section.update_epochs
        count, tokens = max(1, totals["completions"]), max(1, totals["sampled_tokens"])
        learned = max(1, totals["learned_tokens"] * passes)
        variance = totals["credit_squared"] / count - (totals["credit"] / count) ** 2
        metrics = {
            "loss": totals["loss"]
            / max(1, totals["nodes"] * section.shape.generations(index) * passes),
            "entropy": -totals["logprob"] / tokens,
            "zero_advantage_share": totals["zeros"] / count,
            "advantage_std": math.sqrt(max(0.0, variance)),
        }
        if section.entropy_coef > 0:
            metrics["entropy"] = totals["entropy"] / learned
        if section.kl_coef > 0:
            metrics["kl"] = totals["kl"] / learned
        if section.takes_ratios:
            ratios = totals["tokens"] or math.nan  # none where all returns are equal
            metrics |= {name: totals[name] / ratios for name in ("clip_fraction", "approx_kl")}
            metrics["ratio_max"] = sums.maxima.get("ratio_max", math.nan)
        return metrics


def _credit_sums(
    decisions: Decisions, credit_D: Sequence[float], agent: int, learned: Container[int]
) -> Sums:
    """Sum statistics of an agent's decisions, including those without a gradient. Nodes and
    ``learned_tokens`` are those of the ``learned`` units alone: ``refill`` leaves tasks out."""
    of_learned = [nodes for unit, nodes in enumerate(decisions.nodes_U) if unit in learned]
    sums = Sums(nodes=sum(nodes[agent] for nodes in of_learned))
    for unit, of_nodes in enumerate(decisions.of_unit()):
        for (other, _), numbers in of_nodes.items():
            if other != agent:
                continue
            credit = [credit_D[n] for n in numbers]
            completions = [decisions[n].completion for n in numbers]
            tokens = sum(len(c.token_ids) for c in completions)
            sums.add(
                completions=len(numbers),
                zeros=sum(c == 0 for c in credit),
                credit=sum(credit),
                credit_squared=sum(c * c for c in credit),
                sampled_tokens=tokens,
                learned_tokens=tokens if unit in learned else 0,
                logprob=sum(c.logprob for c in completions),
            )
    return sums
