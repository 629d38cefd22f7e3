"""Fixtures of the code domain's tests."""

from __future__ import annotations

import json

import pytest

from tests.support.benchmark_rows import Problem


@pytest.fixture(scope="module")
def problems(shared_data) -> list[Problem]:
    lines = (shared_data / "HumanEval.jsonl").read_text().splitlines()
    return [Problem(json.loads(line)) for line in lines]
