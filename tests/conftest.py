"""What every test shares: one thread a process, and where the benchmark problems lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.runs import Zygote

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


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Starts real runs that need not import anything anew."""
    from tests.support.runs import Zygote

    process = Zygote(tmp_path_factory.mktemp("processes"))
    yield process
    process.close()
