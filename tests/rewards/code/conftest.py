"""Fixtures of the code domain's tests."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from comlrl.rewards.code.reward import CodeReward
from tests.support.benchmark_rows import Problem


@pytest.fixture(scope="module")
def problems(shared_data) -> list[Problem]:
    lines = (shared_data / "HumanEval.jsonl").read_text().splitlines()
    return [Problem(json.loads(line)) for line in lines]


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with CodeReward(workers=2) as reward:
        yield reward
