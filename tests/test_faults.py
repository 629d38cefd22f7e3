"""What goes wrong on real machines, and what a run then does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl.builtin import COOPMINI
from comlrl.config.sections import AgentModelConfig
from comlrl.errors import NonFiniteError, UserError
from comlrl.loop.alarm import CollapseAlarm
from comlrl.models.agent import Agent
from comlrl.models.fast.trie import Trie
from comlrl.models.logprobs import action_logprobs
from comlrl.models.pretrained import build_team, load_model
from comlrl.processes.statistics import Sums
from comlrl.trainers.launch.wiring.machine import check_devices
from comlrl.types import Row, TokenBatch
from comlrl.update.accumulate import accumulate
from comlrl.update.losses import policy_gradient
from comlrl.update.non_finite import explanation
from comlrl.update.optimizer import AgentOptimizer
from tests.support import tiny_models
from tests.support.processes import children
from tests.support.runs import Zygote, metrics, newest_step, small

# Disk and folders


def test_disk_full_while_saving(zygote: Zygote, tmp_path: Path) -> None:
    """Files are limited from outside once a checkpoint is there: the next one does not fit."""
    folder = tmp_path / "run"
    run = zygote.run("magrpo", small("magrpo", folder, max_steps=50, eval_interval=0))
    run.until(lambda: newest_step(folder) > 0)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))
    assert run.wait() == 1, run.output
    assert "error: checkpoint" in run.output and "is untouched" in run.output
    assert "Traceback" not in run.output
    step = newest_step(folder)
    zygote.finish(
        "magrpo", [*small("magrpo", folder, max_steps=step + 1, eval_interval=0), "--resume"]
    )
    assert [line["update"] for line in metrics(folder)] == list(range(1, step + 2))


def test_output_folder_not_writable(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" / "run"
    error = zygote.finish("magrpo", small("magrpo", folder), code=2).error
    assert f"output.dir: '{folder}' cannot be written" in error


# Data


def rows(count: int = 4) -> list[dict[str, Any]]:
    return [json.loads(line) for line in COOPMINI["train"].read_text().splitlines()[:count]]


def data(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("test", None, "`test`"), ("test", "def check(candidate:\n", "does not compile")],
)
def test_bad_row(
    zygote: Zygote, tmp_path: Path, field: str, value: str | None, message: str
) -> None:
    bad = rows()
    bad[2][field] = value
    keys = [f"dataset.name={data(tmp_path, bad)}", "dataset.eval_split=train"]
    arguments = [*small("magrpo", tmp_path / "run", max_steps=1), *keys]
    error = zygote.finish("magrpo", arguments, code=2).error
    assert message in error and "on_bad_row=skip" in error
    run = zygote.finish("magrpo", [*arguments, "dataset.on_bad_row=skip"])
    assert message in run.output  # named, though skipped


def test_empty_split(zygote: Zygote, tmp_path: Path) -> None:
    arguments = [*small("magrpo", tmp_path / "run"), "dataset.train_split=train[:0]"]
    assert "train[:0]" in zygote.finish("magrpo", arguments, code=2).error


def test_prompt_longer_than_the_context(zygote: Zygote, tmp_path: Path) -> None:
    """By max_length, and by what the model itself holds (512 bytes here)."""
    arguments = [*small("magrpo", tmp_path / "run"), "agent_model.max_length=40"]
    error = zygote.finish("magrpo", arguments, code=2).error
    assert "dataset row 'CoopMini" in error and "agent_model.max_length" in error
    long = rows(2)
    long[1]["prompt"] = long[1]["prompt"].replace('"""', '"""' + "Long. " * 100, 1)
    arguments = [
        *small("magrpo", tmp_path / "run", max_steps=1),
        f"agent_model.name={tiny_models.folder('qwen2')}", "dataset.on_bad_row=skip",
        f"dataset.name={data(tmp_path, long)}", "dataset.eval_split=train",
    ]  # fmt: skip
    run = zygote.run("magrpo", arguments)
    run.wait()
    assert "context 512" in run.output


# Models


def test_model_without_pad_token() -> None:
    section = AgentModelConfig(name=str(tiny_models.folder("qwen2", pad=False)))
    _, tokenizer = load_model(section, section.name, "cpu")
    assert 0 <= tokenizer.pad_token_id < tiny_models.VOCABULARY


def test_model_without_eos_token(tmp_path: Path) -> None:
    model, tokenizer = load_model(AgentModelConfig(), str(tiny_models.folder("qwen2")), "cpu")
    model.save_pretrained(tmp_path)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"special_tokens.*no EOS token"):
        load_model(AgentModelConfig(), str(tmp_path), "cpu")
    section = AgentModelConfig(special_tokens={"eos_token": "<eos>"})
    assert load_model(section, str(tmp_path), "cpu")[1].eos_token_id == tiny_models.EOS


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"agent_devices": ["cpu", "cpu"]}, "share one base"),
        ({"agent_devices": ["cpu", "tpu9"], "lora__enabled": False}, "'tpu9' is not a device"),
        ({"agent_devices": ["cuda:0", "cuda:64"], "lora__enabled": False}, "GPU"),
    ],
)
def test_devices_that_cannot_be_had(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config = tiny_models.config(**keys)
        check_devices(config.agent_devices, config.shares_base)


def test_agents_are_placed_where_agent_devices_says() -> None:
    """``meta`` stands for a second GPU: it holds shapes without values."""
    models = [str(tiny_models.folder(kind)) for kind in ("qwen2", "llama")]
    config = tiny_models.config(agents=models, agent_devices=["cpu", "meta"])
    check_devices(config.agent_devices, config.shares_base)
    first, second = build_team(config).agents
    assert (first.device.type, second.device.type) == ("cpu", "meta")
    assert {p.device.type for p in second.parameters()} == {"meta"}


# Workers and services


def test_sandbox_worker_killed_from_outside(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keys = {"max_steps": 6, "eval_interval": 0, "max_new_tokens": 64}
    run = zygote.run("magrpo", small("magrpo", folder, **keys))
    log = folder / "metrics.jsonl"
    run.until(lambda: log.exists() and bool(log.read_text() and children(run.pid)))
    for worker in children(run.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert len(metrics(folder)) == 6


@pytest.mark.slow
def test_wandb_unreachable(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = zygote.finish(
        "magrpo", [*small("magrpo", folder, max_steps=1), "wandb.project=nowhere"],
        WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="0" * 40,
    )  # fmt: skip
    assert "W&B" in run.output and "offline" in run.output
    assert len(metrics(folder)) == 3  # evaluation, step, evaluation


# The update


ROWS = [
    Row(tiny_models.prompt("def f(x):"), tuple(map(tiny_models.prompt, texts)), weights, indices)
    for texts, weights, indices in [
        (("abc", "de", "fghij"), (0.5, -1.0, 0.25), (0, 1, 2)),
        (("kk", "lmnopqrstuvwxyz"), (1.0, -0.5), (0, 2)),
    ]
]


def gradients(agent: Agent) -> list[torch.Tensor]:
    return [p.grad.clone() for p in agent.parameters() if p.grad is not None]


def loss_of(agent: Agent, batch: TokenBatch) -> torch.Tensor:
    logprob_A = action_logprobs(agent, batch, 1.0).logprob_A
    return policy_gradient(logprob_A, batch.weight_RL[batch.action_mask_RL].to(logprob_A.dtype))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_halves_the_micro_batch(
    error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory for 23 tokens, and a row of 9 + 1 + 14 = 24 that are computed: rows are split, nothing
    is lost."""
    team = tiny_models.team()
    with team.acting(0) as agent:
        accumulate(agent, ROWS, lambda batch: (loss_of(agent, batch), Sums()), Sums())
        whole = gradients(agent)
        for parameter in agent.parameters():
            parameter.grad = None

        def scarce(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
            value = loss_of(agent, batch)
            size = Trie.from_batch(batch, last_tokens=False).count
            if size > 23:
                value.backward()  # an error in the middle leaves gradients behind
                raise error
            sizes.append(size)
            return value, Sums(tokens=size)

        sizes, sums = list[int](), Sums()
        agent.micro_batch_tokens = 100
        accumulate(agent, ROWS, scarce, sums)
        # 2 rows → 1 row of 24 → its completions apart, the longest 9 + 14 = 23.
        halved = re.findall(r"micro-batches are limited to (\d+) tokens", capsys.readouterr().err)
        assert halved == ["50", "25", "23"]
        assert agent.micro_batch_tokens == 23
        # 9 + 2 + 1 + 4 = 16 and 9 + 1 = 10 are 18 together, as 8 tokens of the prompts are computed
        # once; 23 is alone. Nothing of what failed is logged.
        assert sorted(sizes[-2:]) == [18, 23] and sums.totals["tokens"] == 18 + 23
        for one, other in zip(whole, gradients(agent), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_out_of_memory_with_a_single_completion_says_what_helps() -> None:
    team = tiny_models.team()

    def never(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
        raise torch.OutOfMemoryError

    with team.acting(0) as agent, pytest.raises(MemoryError, match="gradient_checkpointing"):
        accumulate(agent, ROWS, never, Sums())


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_number_that_is_none_stops_with_its_batch(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file

    team = tiny_models.team()

    def broken(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
        value = loss_of(agent, batch)
        if kind == "loss":
            return value * float("nan"), Sums()
        value.register_hook(lambda gradient: gradient * float("inf"))
        return value, Sums()

    with team.acting(1) as agent:
        before = [p.detach().clone() for p in agent.parameters()]
        with pytest.raises(NonFiniteError, match=kind) as raised:
            accumulate(agent, ROWS, broken, Sums())
        text = explanation(raised.value, 3, tmp_path)
        assert text.startswith("agent 1, training step 3") and str(tmp_path) in text
        saved = load_file(str(tmp_path / "non_finite_batch.safetensors"))
        assert saved["token_ids_RL"].shape == (2, 26) == saved["action_mask_RL"].shape
        for one, other in zip(before, agent.parameters(), strict=True):
            assert torch.equal(one, other)


def test_the_optimizer_does_not_step_on_what_is_no_number() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = AgentOptimizer([parameter], 0.1, max_grad_norm=1.0)
    parameter.grad = torch.tensor([1.0, float("inf")])
    with pytest.raises(NonFiniteError):
        optimizer.step(0.0)
    assert parameter.tolist() == [1.0, 1.0]


def test_a_run_with_an_absurd_learning_rate_stops(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keys = {"learning_rate": 1e30, "max_steps": 20, "eval_interval": 0, "kl_coef": 0.1}
    keys |= {"max_new_tokens": 16, "batch_size": 4}
    run = zygote.finish("magrpo", small("magrpo", folder, **keys), code=1)
    assert "error: agent" in run.output and "learning_rate" in run.output
    where = (folder / "non_finite_batch.safetensors").exists()
    assert where == ("sampling" not in run.output)  # whichever meets it first


# Collapse


def test_collapse_is_reported_once() -> None:
    collapse = CollapseAlarm()
    for _ in range(6):
        assert collapse.look({"entropy": 2.0, "reward_mean": 1.0}) == []
    assert collapse.look({"entropy": 1.0, "reward_mean": 0.5}) == []  # halving is no cliff
    for _ in range(2):
        assert collapse.look({"entropy": 1.0, "reward_mean": 0.05}) == []  # a hard task or two
    (warning,) = collapse.look({"entropy": 1.0, "reward_mean": 0.05})
    assert warning.startswith("reward_mean fell to 0.05") and "learning_rate" in warning
    for _ in range(2):
        assert collapse.look({"entropy": 0.01, "reward_mean": 0.05}) == []
    (warning,) = collapse.look({"entropy": 0.01, "reward_mean": 0.05})
    assert warning.startswith("entropy fell to 0.01")
    assert collapse.look({"entropy": 0.01, "reward_mean": 0.0}) == []


def test_steps_without_an_advantage_are_reported_once_and_at_the_end() -> None:
    alarm = CollapseAlarm()
    equal, different = {"zero_advantage_share": 1.0}, {"zero_advantage_share": 0.98}
    for step_metrics in (equal, equal, different, equal, equal):
        assert alarm.look(step_metrics) == []
    restored = CollapseAlarm()
    restored.load(json.loads(json.dumps(alarm.state())))
    (warning,) = restored.look(equal)
    assert "refill" in warning and "temperature" in warning
    assert restored.look(equal) == []
    assert restored.summary().startswith("6 of 7 steps")
    for _ in range(60):  # rare ones are no cause
        assert restored.look(different) == []
    assert restored.summary() == CollapseAlarm().summary() == ""


def test_a_step_in_which_no_agent_was_called_is_reported_once() -> None:
    alarm = CollapseAlarm()
    assert alarm.look({"tokens": 1.0}) == alarm.look({}) == []
    (warning,) = alarm.look({"tokens": 0.0})
    assert "await" in warning and alarm.look({"tokens": 0.0}) == []


def test_a_score_around_zero_is_no_collapse() -> None:
    """A reward model's: the task's reward, beside it, is watched."""
    collapse = CollapseAlarm()
    for step in range(12):
        assert collapse.look({"reward_mean": 0.1 - 0.1 * step, "task_reward_mean": 1.0}) == []
    for _ in range(2):
        assert collapse.look({"reward_mean": 1.0, "task_reward_mean": 0.05}) == []
    (warning,) = collapse.look({"reward_mean": 1.0, "task_reward_mean": 0.05})
    assert warning.startswith("task_reward_mean fell to 0.05")


def test_steps_of_ties_are_no_collapse() -> None:
    """A batch of one task: some are never solved, others always, and what is unknown is no 0."""
    collapse = CollapseAlarm()
    for step in range(60):
        hard = {"entropy": 0.5, "reward_mean": 0.0}
        easy = {"entropy": float("nan"), "reward_mean": 4.0}
        assert collapse.look(hard if step % 3 else easy) == []


def test_collapse_goes_on_after_resuming() -> None:
    """Told or not, level and age: a resumed run warns where the undisturbed one would."""
    whole, parts = CollapseAlarm(), CollapseAlarm()
    values = [2.0, 1.5, 1.8, 1.2, 1.0, 0.9, 0.01, 0.01, 0.01, 0.01]
    alarms = [whole.look({"entropy": value}) for value in values]
    again = [parts.look({"entropy": value}) for value in values[:7]]
    resumed = CollapseAlarm()
    resumed.load(json.loads(json.dumps(parts.state())))
    again += [resumed.look({"entropy": value}) for value in values[7:]]
    assert alarms == again and sum(map(len, alarms)) == 1


def test_a_slow_decline_is_learning_not_collapse() -> None:
    collapse = CollapseAlarm()
    assert not any(collapse.look({"entropy": 2.0 * 0.9**step}) for step in range(60))
