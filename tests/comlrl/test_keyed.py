"""Randomness from keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from comlrl.keyed import normals, order, uniforms


def test_uniforms_depend_on_their_key_alone():
    assert (uniforms((1, "a", (0, 2)), 3) == uniforms((1, "a", (0, 2)), 9)[:3]).all()
    keys = [(s, k, t, p, a, g) for s in (0, 1) for k in ("train", "eval") for t in ("x", "y")
            for p in ((), (0,), (1,)) for a in (0, 1) for g in (0, 1)]  # fmt: skip
    drawn = np.concatenate([uniforms(key, 50) for key in keys])
    assert len(np.unique(drawn)) == len(drawn)
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 4 * np.sqrt(1 / 12 / len(drawn))


def test_an_order_is_a_permutation_of_its_key():
    assert sorted(order((1, "epoch", 0), 50)) == list(range(50))
    assert order((1, "epoch", 0), 50) == order((1, "epoch", 0), 50)
    assert order((1, "epoch", 0), 50) != order((1, "epoch", 1), 50)


def test_keyed_normals_depend_on_their_key_alone_and_are_normal():
    many = normals(("a", 1), 20_000)
    assert torch.equal(many, normals(("a", 1), 20_000))
    assert not torch.equal(many, normals(("a", 2), 20_000))
    assert abs(float(many.mean())) < 0.03  # standard error 0.007
    assert float(many.std()) == pytest.approx(1.0, abs=0.03)
