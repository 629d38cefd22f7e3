"""Corrects for a sampler that is not quite the policy that is trained: an engine computes in other
kernels, and often in another precision, and with ``generation.overlap`` a step's first turn is
drawn by the weights from before the last update.

With μ(y | x) what drew a completion and π(y | x) the trained policy as the step begins, both
products over its tokens, a completion counts in its agent's gradient with

    c(y) = min(π(y | x) / μ(y | x), cap)

which is held fixed (no gradient flows through it). Where μ was truncated, π is over the same tokens
at each position. Without the cap this is exact: the expected gradient under μ is that under π, for
team-mates as they acted. The cap bounds the variance (truncated importance sampling, Ionides
2008).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from comlrl.errors import warning
from comlrl.models.logprobs import action_logprobs
from comlrl.models.team import Team
from comlrl.processes.statistics import Sums
from comlrl.types import Completion, Message, Request, Row, Sampler, Sampling
from comlrl.update.accumulate import measure_all
from comlrl.update.per_token import PerToken

SOUND = (0.8, 1.25)  # of the mean ratio, which is 1 where μ is what it says


class ImportanceWeightedSampler:
    """A Sampler: another's completions, with their weights c(y)."""

    def __init__(self, team: Team, sampler: Sampler, cap: float) -> None:
        self.team, self.sampler, self.cap = team, sampler, cap
        self.sums = Sums()  # since ``metrics`` was last asked
        self.warned = False

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return self.sampler.encode(agent, prompt)

    def fits(self, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        return self.sampler.fits(prompt_ids, sampling)

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        groups_N = self.sampler.sample(requests_N, sampling)
        if sampling.temperature == 0:  # a baseline's, which nothing learns from
            return groups_N
        return [
            self._weighted(index, requests, groups, sampling.of(index).temperature)
            for index, (requests, groups) in enumerate(zip(requests_N, groups_N, strict=True))
        ]

    def metrics(self) -> dict[str, float]:
        """Of what was sampled since they were last asked for. A collective call."""
        sums, self.sums = self.sums.all_reduced(), Sums()
        count = sums.of.pop("completions", 0)
        if not count:
            return {}
        metrics = {f"importance/{name}": value / count for name, value in sums.of.items()}
        self._warn(metrics["importance/ratio_mean"])
        return metrics | {f"importance/{name}": value for name, value in sums.maxima.items()}

    def _weighted(
        self,
        index: int,
        requests: Sequence[Request],
        groups: Sequence[tuple[Completion, ...]],
        temperature: float,
    ) -> list[tuple[Completion, ...]]:
        """An agent's completions with their weights."""
        if not requests:
            return []
        numbers, logprob = itertools.count(), PerToken()
        rows = [
            Row.of(
                request.prompt_ids,
                group,
                itertools.repeat(1.0, len(group)),
                itertools.islice(numbers, len(group)),
            )
            for request, group in zip(requests, groups, strict=True)
        ]
        with self.team.acting(index) as agent:
            measure_all(
                agent,
                rows,
                lambda b: logprob.put(b, action_logprobs(agent, b, temperature).logprob_A),
                self.team.run_parallel,
            )
        drawn_C = [completion.logprob for group in groups for completion in group]
        found_C = [float(logprob.at([c]).double().sum()) for c in range(len(drawn_C))]
        log_ratio_C = [found - drawn for found, drawn in zip(found_C, drawn_C, strict=True)]
        ratio_C = torch.tensor(log_ratio_C, dtype=torch.float64).exp()
        self.sums.add(
            completions=len(drawn_C), ratio_mean=ratio_C, truncated_share=ratio_C > self.cap
        )
        self.sums.reach(ratio_max=float(ratio_C.max()))
        weights = iter(ratio_C.clamp(max=self.cap).tolist())
        return [tuple(replace(c, importance=next(weights)) for c in group) for group in groups]

    def _warn(self, mean: float) -> None:
        if SOUND[0] <= mean <= SOUND[1] or self.warned:
            return
        self.warned = True
        warning(
            f"the mean importance ratio is {mean:.3g}, outside "
            f"[{SOUND[0]}, {SOUND[1]}]: what samples is another policy than the one trained; "
            "see that the server has the same model in the same precision (--dtype), and "
            "--logprobs-mode processed_logprobs; or, with generation.overlap=1, give a lower "
            "learning rate"
        )
