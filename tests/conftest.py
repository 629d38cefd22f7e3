"""What every test shares: one thread a process, and where the benchmark problems lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # small tensors: more threads only wait for each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the network

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of HumanEval.jsonl and CoopHumanEval.jsonl."""
    if not (SHARED_DATA / "HumanEval.jsonl").exists():
        pytest.skip(f"the benchmark problems are not at {SHARED_DATA}")
    return SHARED_DATA
