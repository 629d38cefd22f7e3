"""Agents that a service plays, in whole runs: a local server, which counts what it was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comlrl.errors import UserError
from comlrl.train_magrpo import build
from comlrl.trainers.launch.checks.validation import validate
from comlrl.trainers.launch.commands.evaluate import main as evaluate
from comlrl.trainers.launch.commands.train import main
from tests.support.chat_server import ChatServer, chat_server
from tests.support.documented import documented
from tests.support.runs import ROOT, small
from tests.support.tiny_models import config

KEY = "sk-not-in-any-file"
URL = "http://localhost:8000/v1"


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[ChatServer]:
    with chat_server(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture
def server(process: ChatServer, monkeypatch: pytest.MonkeyPatch) -> ChatServer:
    monkeypatch.setenv("SERVICE_KEY", KEY)
    process.get("reset")
    return process


def run(
    server: ChatServer,
    folder: Path,
    *more: str,
    role: str = "aux",
    model: str = "good",
    **keys: Any,
) -> int:
    """Train a small team, one of which the server plays."""
    api = {"base_url": server.url, "model": model, "key_env": "SERVICE_KEY", "retries": 0}
    arguments = small("magrpo", folder, **keys)
    return main("magrpo", build, [*arguments, f"agents.{role}.api={json.dumps(api)}", *more])


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def count(folder: Path, name: str, agent: int = 0) -> float:
    return sum(record["metrics"][f"agent_{agent}/api/{name}"] for record in records(folder))


@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_a_service_plays_a_turn_and_the_other_agent_learns(server, tmp_path, order):
    keys = {"turn_order": order, "num_generations_sequential": 2, "max_new_tokens": 24}
    assert run(server, tmp_path / "run", **keys) == 0
    seen = server.get("seen")
    assert {request["key"] for request in seen} == {f"Bearer {KEY}"}
    # 4 steps of 2 tasks with 2 completions; evaluations before, in the middle and after the steps,
    # of 2 tasks, whose requests are the same each time
    assert count(tmp_path / "run", "calls") == len(seen) == 4 * 2 * 2 + 2
    assert count(tmp_path / "run", "cached") == 2 * 2
    assert count(tmp_path / "run", "completion_tokens") == 3 * len(seen)
    for record in records(tmp_path / "run"):
        assert "agent_0/completion_length_mean" not in record["metrics"]
        assert "agent_0/loss" not in record["metrics"]
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or KEY.encode() not in file.read_bytes()
    logged = {name for name in records(tmp_path / "run")[0]["metrics"] if "/api/" in name}
    of_page = {row.name for row in documented() if "/api/" in row.name}
    assert {name.replace("agent_0", "agent_I") for name in logged} == of_page

    out = tmp_path / "evaluation.json"
    server.get("reset")
    assert evaluate(["--checkpoint", str(tmp_path / "run"), "--out", str(out)]) == 0
    budget = json.loads(out.read_text())["budget"]
    assert budget["agent_0/api/calls"] == len(server.get("seen")) > 0


def test_a_program_calls_a_service(server, tmp_path):
    arguments = small("magrpo", tmp_path / "run", max_new_tokens=24)
    arguments[1] = str(ROOT / "configs/magrpo_program_quickstart.yaml")
    api = {"base_url": server.url, "model": "late", "key_env": "SERVICE_KEY"}
    arguments.append(f"agents.helper.api={json.dumps(api)}")
    assert main("magrpo", build, arguments) == 0
    assert count(tmp_path / "run", "calls") == len(server.get("seen")) >= 4 * 2 * 2


def test_a_resumed_run_asks_nothing_twice(server, tmp_path):
    """The run ends where the service fails, with a checkpoint; resumed it asks for the rest."""
    undisturbed = tmp_path / "undisturbed"
    assert run(server, undisturbed) == 0
    asked = len(server.get("seen"))
    server.get("reset")
    broken = ",".join(["good"] * 11 + ["500", "good"])  # in the third step
    folder = tmp_path / "run"
    assert run(server, folder, model=broken) == 1
    assert (folder / "checkpoints/step_000002").is_dir()
    assert run(server, folder, "--resume", model=broken) == 0
    seen = server.get("seen")
    assert len(seen) == asked + 1  # the one that failed
    assert records(folder)[-1]["metrics"].keys() == records(undisturbed)[-1]["metrics"].keys()


def test_a_failure_in_the_first_step_keeps_what_was_answered(server, tmp_path):
    broken = "good,good,good,500,good"
    assert run(server, tmp_path / "run", model=broken, eval_interval=0) == 1
    first = len(server.get("seen"))
    assert run(server, tmp_path / "run", "--resume", model=broken, eval_interval=0) == 0
    assert len(server.get("seen")) == 4 * 2 * 2 + 1 and first <= 4


def test_an_empty_answer_is_counted(server, tmp_path):
    api = {"base_url": server.url, "model": "good,500,good", "retries": 0, "on_error": "empty"}
    arguments = small("magrpo", tmp_path / "run", eval_interval=0)
    assert main("magrpo", build, [*arguments, f"agents.aux.api={json.dumps(api)}"]) == 0
    assert count(tmp_path / "run", "failed") == 1


def test_a_dry_run_asks_nothing_and_says_how_much_will_be(server, tmp_path, capsys):
    assert run(server, tmp_path / "run", "--dry-run") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "API calls of aux" in line)
    assert line.split()[-2:] == ["4", "16"] and server.get("seen") == []


REFUSED = [
    ({"train": True, "api": {"base_url": URL, "model": "m"}}, {}, "agents.aux.train"),
    ({"api": {"model": "m"}}, {}, "agents.aux.api.base_url"),
    ({"api": {"base_url": URL}}, {}, "agents.aux.api.model"),
    ({"api": {"base_url": URL, "model": "m", "key": "k"}}, {}, "agents.aux.api.key"),
    ({"api": {"base_url": URL, "model": "m", "timeout": 0}}, {}, "agents.aux.api.timeout"),
    (
        {"api": {"base_url": URL, "model": "m"}, "learning_rate": 0.1},
        {},
        "agents.aux.learning_rate",
    ),
    ({"api": {"base_url": URL, "model": "m"}, "model": "x"}, {}, "agents.aux.model"),
    (
        {"api": {"base_url": URL, "model": "m"}},
        {"generation__backend": "vllm", "generation__vllm_url": URL},
        "generation.backend",
    ),
]


@pytest.mark.parametrize(("entry", "keys", "key"), REFUSED, ids=[key for *_, key in REFUSED])
def test_what_cannot_work_is_refused_by_its_key(entry, keys, key):
    with pytest.raises(UserError) as raised:
        validate(config("magrpo", agents={"aux": entry}, **keys))
    assert str(raised.value).startswith(key)


@pytest.mark.parametrize(
    ("algorithm", "keys", "key"),
    [
        ("ppo", {"num_agents": 2, "critic": "centralized"}, "ppo.critic"),
        ("madpo", {}, "agents.aux.api"),
        ("shppo", {}, "agents.aux.api"),
    ],
)
def test_algorithms_that_read_every_agents_tokens_are_refused(algorithm, keys, key):
    entry = {"api": {"base_url": URL, "model": "m"}}
    with pytest.raises(UserError) as raised:
        validate(config(algorithm, agents={"aux": entry}, **keys))
    assert str(raised.value).startswith(key)


def test_a_missing_key_and_address_end_the_command_before_a_model_loads(tmp_path, capsys):
    for api, key in (
        ({"base_url": "localhost:8000", "model": "m"}, "agents.aux.api.base_url"),
        ({"base_url": URL, "model": "m", "key_env": "NO_SUCH_KEY"}, "agents.aux.api.key_env"),
    ):
        arguments = [*small("magrpo", tmp_path / "run"), f"agents.aux.api={json.dumps(api)}"]
        assert main("magrpo", build, arguments) == 2
        assert f"error: {key}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
