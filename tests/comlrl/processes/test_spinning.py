"""The number of spins reaches libgomp: it is set before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from comlrl.processes.spinning import SPINS, limit_spinning
from tests.support.runs import ROOT


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, str(SPINS)),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_what_the_user_has_set_stays(before, after, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == after


PROGRAM = """
import sys
import {script}

class Called(BaseException):
    pass

def called():
    assert "torch" not in sys.modules
    raise Called

sys.modules[{script}.main.__module__].limit_spinning = called
try:
    {script}.main({arguments})
except Called:
    print("called")
"""


@pytest.mark.parametrize(
    ("script", "arguments"), [("train_magrpo", "'magrpo', None, []"), ("evaluate", "[]")]
)
def test_torch_is_not_imported_before(script, arguments):
    program = PROGRAM.format(script=script, arguments=arguments)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "called\n"
