"""Fixtures of the sandbox's tests."""

from __future__ import annotations

import shutil

import pytest

from comlrl.rewards.sandbox.levels import LEVELS, failure
from tests.support.marks import some_slow

USUAL = "unshare" if shutil.which("bwrap") is None else "bubblewrap"
OTHERS = [level for level in LEVELS if level != USUAL]


@pytest.fixture(scope="module", params=some_slow(LEVELS, *OTHERS))
def level(request) -> str:
    """Each level of isolation. The default suite has the best one that this machine may offer."""
    if failure(request.param) is not None:
        pytest.skip(f"not offered here: {failure(request.param)}")
    return request.param
