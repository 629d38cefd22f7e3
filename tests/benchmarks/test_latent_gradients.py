"""The comparison of gradients refuses what it has no standard error of."""

from __future__ import annotations

import sys

import pytest

from benchmarks import latent_gradients


def test_one_seed_is_refused_before_it_runs(monkeypatch, capsys):
    monkeypatch.setattr(latent_gradients, "learn", lambda *_: pytest.fail("begun"))
    monkeypatch.setattr(sys, "argv", ["latent_gradients.py", "--seeds", "1"])
    with pytest.raises(SystemExit) as ended:
        latent_gradients.main()
    assert ended.value.code == 2 and "--seeds" in capsys.readouterr().err
