"""What every test shares: its suite, one thread a process, and where the benchmark problems lie.

There are three suites (see the Makefile). ``SUITES`` lists the files that are not in the default
suite. Of the other files, what is marked ``slow``, what starts runs by ``zygote``, and the cases
that ``sample(n)`` leaves out are in ``runs``.
"""

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
SUITES = {  # parts of paths below tests/
    "runs": (
        "commands/", "gpu/", "programs/test_command.py", "programs/test_frameworks.py",
        "test_any_domain.py", "test_api_", "test_distributed", "test_faults.py", "test_measured.py",
        "test_external_serve.py", "test_multi_turn.py", "test_odd_machines.py",
        "test_own_reward_runs.py", "test_program_runs.py", "test_program_vllm_runs.py",
        "test_resume.py", "test_reward_adversaries.py", "test_reward_isolation.py",
        "test_reward_walls.py", "test_reward_workers.py", "test_run_lock.py",
        "test_train_magrpo.py", "test_vllm_itself.py", "test_vllm_runs.py", "test_vllm_servers.py",
        "test_writing_runs.py", "wiring/test_resolved_work.py",
    ),
    "release": (
        "benchmarks/", "builtin/", "loggers/report/", "test_docs.py", "test_model_card.py",
        "test_notebook.py", "test_package.py", "test_pages.py", "test_prose.py", "test_scripts.py",
        "test_setup.py", "test_shipped_configs.py", "test_site.py", "test_words.py", "tools/",
    ),
}  # fmt: skip
SHARED_DATA = ROOT.parent / "shared" / "data"


def suite_of(path: str) -> str | None:
    """Return the suite that the file of a test belongs to; None: the default one."""
    below = path.partition("tests/")[2]
    matches = [name for name, parts in SUITES.items() if any(part in below for part in parts)]
    return matches[-1] if matches else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its suite, before ``-m`` selects."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        suite = suite_of(item.path.as_posix())
        if suite is None and "zygote" in getattr(item, "fixturenames", ()):
            suite = "runs"
        if suite is not None or item.get_closest_marker("slow") is not None:
            item.add_marker(suite or "runs")
        elif item.get_closest_marker("sample") is not None:
            name = item.nodeid.rpartition("::")[2].partition("[")[0]
            cases.setdefault((item.path, name), []).append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("sample")
        assert marker is not None
        count = min(len(of_test), marker.args[0])
        chosen = {index * len(of_test) // count for index in range(count)}
        for index, item in enumerate(of_test):
            if index not in chosen:
                item.add_marker("runs")


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
