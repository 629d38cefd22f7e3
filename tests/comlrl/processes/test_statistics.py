"""Sums that stay tensors until they are read."""

from __future__ import annotations

import math

import torch

from comlrl.processes.statistics import Sums


def test_sums_of_tensors_have_the_bits_of_numbers_added_one_by_one():
    parts = [torch.randn(7, generator=torch.Generator().manual_seed(n)) for n in range(20)]
    sums, plain = Sums(), 0.0
    for part in parts:
        sums.absorb(Sums(loss=part, tokens=len(part)))
        plain += float(part.sum())
    assert sums.totals == {"loss": plain, "tokens": 140}
    assert sums.totals["other"] == 0


def test_reading_does_not_end_adding():
    sums = Sums(loss=torch.tensor([1.0, 2.0]))
    assert sums.totals["loss"] == 3.0
    sums.add(loss=torch.tensor(0.5), mixed=True)
    sums.add(loss=1, mixed=torch.tensor([True, True]))
    assert sums.totals == {"loss": 4.5, "mixed": 3.0}


def test_maxima_of_numbers_and_tensors():
    sums = Sums()
    for value in (1.5, torch.tensor(2.5), torch.tensor(math.nan), 2.0):
        sums.reach(ratio=value)
    sums.absorb(Sums())
    assert sums.maxima == {"ratio": 2.5}


def test_a_mean_is_over_any_weight():
    assert Sums(pairs=0.25, loss=0.125).means("pairs") == {"loss": 0.5}
    assert Sums(pairs=0, loss=0).means("pairs") == {"loss": 0}
