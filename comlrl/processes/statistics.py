"""Sums, means and deviations of values on several processes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comlrl.processes import distributed


def standardized(values: torch.Tensor) -> torch.Tensor:
    """Return (x − mean) / (standard deviation + 1e-8), over all processes' values."""
    count, mean, deviation = moments(values)
    return (values - mean) / (deviation + 1e-8) if count else values


def moments(values: torch.Tensor) -> tuple[int, float, float]:
    """Return count, mean and standard deviation of all processes' values; NaN if none."""
    sums = distributed.all_reduce_counts(
        {"count": len(values), "sum": float(values.double().sum())}
    )
    count = int(sums["count"])
    if count == 0:
        return 0, math.nan, math.nan
    mean = sums["sum"] / count
    squares = distributed.total(float(((values.double() - mean) ** 2).sum()))
    return count, mean, math.sqrt(squares / count)


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """Return 1 − Var(returns − values) / Var(returns); NaN if all returns are equal."""
    _, _, error = moments(returns - values)
    _, _, spread = moments(returns)
    return 1 - (error / spread) ** 2 if spread > 0 else math.nan


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and largest of all processes' values; (0, 0) if there are none."""
    local = values.detach().flatten().tolist()
    parts = distributed.all_gather((min(local), max(local)) if local else ())
    ends = [end for part in parts for end in part]
    return (min(ends), max(ends)) if ends else (0.0, 0.0)


class Sums:
    """Named sums and maxima for the log, over micro-batches, updates, agents and processes.

    Sums of tensors stay on their device, in float64, until ``totals`` or ``maxima`` is read, so
    that nothing waits for a GPU until then.
    """

    def __init__(self, **values: float | torch.Tensor) -> None:
        self._totals: dict[str, Any] = defaultdict(float)
        self._maxima: dict[str, Any] = {}
        self.add(**values)

    @property
    def totals(self) -> dict[str, float]:
        """The sums by name; 0 for other names."""
        return _read(self._totals)

    @property
    def maxima(self) -> dict[str, float]:
        return _read(self._maxima)

    def add(self, **values: float | torch.Tensor) -> None:
        """Add numbers, or the sums of tensors."""
        for name, value in values.items():
            before = self._totals[name]
            if isinstance(value, torch.Tensor):
                value = value.detach().sum().double()
                if isinstance(before, torch.Tensor):
                    value = value.to(before.device)
            self._totals[name] = before + value

    def reach(self, **values: float | torch.Tensor) -> None:
        """Update maxima; tensors must have one element."""
        for name, value in values.items():
            before = self._maxima.get(name, value)
            if isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor):
                first = torch.as_tensor(before).detach().double()
                second = torch.as_tensor(value).detach().double()
                self._maxima[name] = torch.fmax(first, second.to(first.device))
            else:
                self._maxima[name] = max(before, value)

    def absorb(self, other: Sums) -> None:
        self.add(**other._totals)
        self.reach(**other._maxima)

    def all_reduced(self) -> Sums:
        """Return the sums and maxima over all processes. A collective call."""
        reduced = Sums()
        for totals, maxima in distributed.all_gather((dict(self.totals), self.maxima)):
            reduced.add(**totals)
            reduced.reach(**maxima)
        return reduced

    def means(self, per: str) -> dict[str, float]:
        """Return all processes' sums divided by that of ``per``, and maxima. A collective call."""
        reduced = self.all_reduced()
        count = reduced.totals[per] or 1.0
        return {
            k: reduced.totals[k] / count for k in sorted(reduced.totals) if k != per
        } | reduced.maxima


def _read(values: dict[str, Any]) -> dict[str, float]:
    """Replace tensors by numbers in place, with one copy to the host."""
    tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
    if tensors:
        device = next(iter(tensors.values())).device
        numbers = torch.stack([x.to(device) for x in tensors.values()]).tolist()
        values.update(zip(tensors, numbers, strict=True))
    return values


def agent_means(metrics_N: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the agents that have it and, for a team, per agent."""
    values_of: dict[str, list[float]] = {}
    for agent_metrics in metrics_N:
        for name, value in agent_metrics.items():
            values_of.setdefault(name, []).append(value)
    metrics = {name: sum(values) / len(values) for name, values in values_of.items()}
    if len(metrics_N) > 1:
        for index, agent_metrics in enumerate(metrics_N):
            metrics |= {f"agent_{index}/{name}": value for name, value in agent_metrics.items()}
    return metrics
