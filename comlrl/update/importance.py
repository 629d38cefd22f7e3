"""Importance weights for a sampler that differs from the trained policy: an inference engine uses
other kernels, and often another precision, and with ``generation.overlap`` a step is sampled with
the weights from before the last update.

With the sampling distribution μ(y | x) and the trained policy π(y | x) as the step begins, both
products over tokens, a completion's weight in its agent's gradient is

    c(y) = min(π(y | x) / μ(y | x), cap)

No gradient flows through c. If μ was truncated, π is renormalized over the same tokens at each
position. Without the cap the correction is exact: the expected gradient under μ is that under π,
given team-mates, earlier states and later turns as sampled. The cap bounds the variance (truncated
importance sampling, Ionides 2008).

If both use the same weights, |log π(y | x) − log μ(y | x)| is only rounding, on average far below
``SOUND`` per token and ``SOUND_WHOLE`` per completion. The mean of the ratio is no such check: its
expectation is 1 under any μ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from comlrl.errors import warning
from comlrl.models.logprobs import action_logprobs
from comlrl.models.team import Team
from comlrl.processes.statistics import Sums
from comlrl.types import (
    AsyncSampler,
    Completion,
    Node,
    Request,
    Row,
    Sampler,
    Sampling,
    ServedSampler,
    Tree,
)
from comlrl.update.accumulate import measure_all
from comlrl.update.per_token import PerToken

SOUND = 0.05  # most |log ratio| per token that is plausible as rounding
SOUND_WHOLE = math.log(2)  # the same per completion: half or twice the weight


class ImportanceWeightedSampler:
    """A Sampler that wraps another and adds the weights c(y) to its completions."""

    def __init__(self, team: Team, sampler: Sampler, cap: float) -> None:
        self.team, self.sampler, self.cap = team, sampler, cap
        self.encode, self.fits, self.token_texts = sampler.encode, sampler.fits, sampler.token_texts
        self.sums = Sums()  # of this process, since ``collect``
        self.unlogged = Sums()  # of all processes, since the last call of ``metrics``
        self.warned = False

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        return self.weighted(requests_N, self.sampler.sample(requests_N, sampling), sampling)

    def present(self) -> AsyncSampler:
        """Return the asynchronous sampler; pass its completions to ``weighted`` once all exist."""
        assert isinstance(self.sampler, ServedSampler)
        return self.sampler.present()

    def weighted(
        self,
        requests_N: Sequence[Sequence[Request]],
        groups_N: Sequence[Sequence[tuple[Completion, ...]]],
        sampling: Sampling,
    ) -> list[list[tuple[Completion, ...]]]:
        """Return the completions of these requests with their weights c(y)."""
        if sampling.temperature == 0:  # a greedy baseline, from which no policy learns
            return [list(groups) for groups in groups_N]
        return [
            self._weighted(
                index,
                [r.prompt_ids for r in requests],
                groups,
                sampling.for_agent(index).temperature,
            )
            for index, (requests, groups) in enumerate(zip(requests_N, groups_N, strict=True))
        ]

    def weigh(self, trees: Sequence[Tree], sampling: Sampling) -> list[Tree]:
        """Return trees that were sampled with older policies, with the weights c(y) of their
        completions. A collective call if models are split."""
        weighted_N = []
        for agent in range(max((tree.num_agents for tree in trees), default=0)):
            turns = [
                node.agents_N[agent - node.first_agent]
                for tree in trees
                for node in tree.nodes
                if agent in node.acting
            ]
            prompts, groups = [t.prompt_ids for t in turns], [t.completions_G for t in turns]
            temperature = sampling.for_agent(agent).temperature
            weighted_N.append(iter(self._weighted(agent, prompts, groups, temperature, older=True)))

        def weighted(node: Node) -> Node:
            turns = zip(node.acting, node.agents_N, strict=True)
            return replace(
                node,
                agents_N=tuple(replace(t, completions_G=next(weighted_N[i])) for i, t in turns),
            )

        return [replace(tree, nodes=tuple(map(weighted, tree.nodes))) for tree in trees]

    def collect(self) -> None:
        """Add up the sums of all processes for the next checkpoint. A collective call."""
        sums, self.sums = self.sums.all_reduced(), Sums()
        self.unlogged.absorb(sums)

    def state(self) -> dict[str, Any]:
        """Return the state that ``metrics`` needs after a resume; the same on all processes."""
        return {"sums": dict(self.unlogged.totals), "maxima": dict(self.unlogged.maxima)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned; an empty mapping, from an older checkpoint, resets it."""
        self.unlogged = Sums(**state.get("sums", {}))
        self.unlogged.reach(**state.get("maxima", {}))

    def metrics(self) -> dict[str, float]:
        """Return metrics of the completions sampled since the last call. A collective call."""
        self.collect()
        sums, self.unlogged = self.unlogged, Sums()
        count = sums.totals.pop("completions", 0)
        if not count:
            return {}
        distance, tokens, present = (
            sums.totals.pop(name, 0.0) for name in ("distance", "tokens", "present")
        )
        if tokens:
            self._warn(distance / tokens, distance / present)
        metrics = {f"importance/{name}": value / count for name, value in sums.totals.items()}
        return metrics | {f"importance/{name}": value for name, value in sums.maxima.items()}

    def _weighted(
        self,
        index: int,
        prompts: Sequence[tuple[int, ...]],
        groups: Sequence[tuple[Completion, ...]],
        temperature: float,
        *,
        older: bool = False,
    ) -> list[tuple[Completion, ...]]:
        """Return an agent's completions with their weights. ``older``: they were sampled before
        the last update."""
        if not prompts:
            return []
        numbers, logprob = itertools.count(), PerToken()
        rows = [
            Row.from_completions(
                prompt_ids,
                group,
                itertools.repeat(1.0, len(group)),
                itertools.islice(numbers, len(group)),
            )
            for prompt_ids, group in zip(prompts, groups, strict=True)
        ]
        with self.team.acting(index) as agent:
            measure_all(
                agent,
                rows,
                lambda b: logprob.put(b, action_logprobs(agent, b, temperature).logprob_A),
                self.team.run_parallel,
            )
        drawn_C = [completion.logprob for group in groups for completion in group]
        current_C = [float(logprob.at([c]).double().sum()) for c in range(len(drawn_C))]
        log_ratio_C = [current - drawn for current, drawn in zip(current_C, drawn_C, strict=True)]
        ratio_C = torch.tensor(log_ratio_C, dtype=torch.float64).exp()
        self.sums.add(
            completions=len(drawn_C), ratio_mean=ratio_C, truncated_share=ratio_C > self.cap
        )
        if not older:
            tokens = sum(len(c.token_ids) for group in groups for c in group)
            self.sums.add(
                distance=math.fsum(map(abs, log_ratio_C)), tokens=tokens, present=len(drawn_C)
            )
        self.sums.reach(ratio_max=float(ratio_C.max()))
        weights = iter(ratio_C.clamp(max=self.cap).tolist())
        return [tuple(replace(c, importance=next(weights)) for c in group) for group in groups]

    def _warn(self, of_token: float, of_completion: float) -> None:
        if self.warned or (of_token <= SOUND and of_completion <= SOUND_WHOLE):
            return
        self.warned = True
        warning(
            f"the server's log-probabilities differ from the trained policy's by {of_token:.2g} a "
            f"token and {of_completion:.2g} a completion, more than rounding does ({SOUND} and "
            f"{SOUND_WHOLE:.2g}); start it with the same model and --dtype, and --logprobs-mode "
            "processed_logprobs"
        )
