"""``comlrl.train`` and ``comlrl.evaluate``: the commands' runs, from Python."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import datasets
import pytest
import yaml
from peft import PeftModel

import comlrl
from comlrl.trainers.launch.commands import evaluate as evaluate_command
from comlrl.trainers.launch.commands import train as train_command
from tests.support.runs import CLOCK

ROWS = [{"prompt": "def f():"}, {"prompt": "def g():"}, {"prompt": "def h():"}]
AGENTS = {"aux": "# help\n{prompt}\n", "main": "{prompt}\n    return "}
SMALL = {
    "magrpo.max_steps": 2, "magrpo.num_train_epochs": None, "magrpo.num_generations": 2,
    "magrpo.batch_size": 2, "magrpo.max_new_tokens": 4, "magrpo.save_steps": 1, "lora.r": 4,
}  # fmt: skip
REWARD = """
from comlrl.types import Domain, Score, Task

def value(main, aux):
    return len(main) / 10 + aux.count("e")

class Reward:
    def score(self, actions):
        return [value(a.completions_N[1], a.completions_N[0]) for a in actions]

class Work(Domain):
    fields, reward = ("prompt",), Reward
    def task(self, name, row):
        return Task(name, row)
    def roles(self, num_agents):
        return "aux", "main"
    def templates(self, num_agents):
        return "", ""
    def values(self, task, num_agents):
        return ({"prompt": task.fields["prompt"]},) * 2
    def problem(self, task):
        return task.fields["prompt"]
"""


def reward(task: comlrl.Task, answers: dict[str, str]) -> float:
    return len(answers["main"]) / 10 + answers["aux"].count("e")


def passing(task: comlrl.Task, answers: dict[str, str]) -> comlrl.Score:
    return comlrl.Score(1.0, passed=True)


async def play(task, agents):
    text = await agents["aux"](agents.prompts["aux"])
    return len(await agents["main"](f"{agents.prompts['main']}{text}")) / 10


def train(folder: Path, **given):
    arguments = {"tasks": ROWS, "agents": AGENTS, "reward": reward} | given
    overrides = SMALL | {"output.dir": folder} | arguments.pop("overrides", {})
    algorithm = arguments.pop("algorithm", "magrpo")
    return comlrl.train(algorithm, overrides=overrides, **arguments)


def timeless(records: list[dict]) -> list[dict]:
    return [
        {name: v for name, v in r.items() if not any(part in name for part in CLOCK)}
        for r in records
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> comlrl.Run:
    return train(tmp_path_factory.mktemp("run") / "run")


@pytest.mark.slow
def test_a_run_from_python_is_the_commands_run(run: comlrl.Run, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{r["prompt"]}"}}\n' for r in ROWS))
    tree = {
        "domain": "my_rewards:Work", "prompts": AGENTS, "dataset": {"name": "rows.jsonl"},
        "magrpo": {"num_agents": 2},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    items = [f"{key}={value}" for key, value in SMALL.items()]
    import train_magrpo

    words = ["--config", str(tmp_path / "run.yaml"), "--override", *items]
    words.append(f"output.dir={tmp_path / 'run'}")
    assert train_command.main("magrpo", train_magrpo.build, words) == 0
    by_command = comlrl.Run(tmp_path / "run")
    assert len(run.metrics) == 2 and timeless(run.metrics) == timeless(by_command.metrics)
    both = [comlrl.evaluate(each, k=2, overrides={"dataset.eval_split": "train"}) for each in
            (run, by_command.path)]  # fmt: skip
    assert both[0]["metrics"] == both[1]["metrics"]


def test_what_a_run_gives(run: comlrl.Run) -> None:
    assert isinstance(run.model("aux"), PeftModel)
    assert "<html" in run.report.path.read_text() and "<iframe" in run.report._repr_html_()
    with pytest.raises(comlrl.UserError, match="'auxx'"):
        run.model("auxx")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"algorithm": "magrop"}, "algorithm"),
        ({"overrides": {"magrpo.learning_rat": 1}}, "magrpo.learning_rat"),
        ({"overrides": {"magrpo.num_generations": 1.5}}, "magrpo.num_generations"),
        ({"overrides": {"magrpo.num_agents": 3}}, "magrpo.num_agents"),
        ({"overrides": {"dataset.train_split": "test"}}, "dataset.train_split"),
        ({"model": "no/such/model/at/all"}, "agent_model.name"),
        ({"tasks": []}, "tasks"),
        ({"tasks": 3}, "tasks"),
        ({"tasks": ["a", 3]}, "tasks: row 1"),
        ({"tasks": [{"prompt": "a"}, {"text": "b"}]}, "dataset.name"),
        ({"agents": {"aux": "{promt}", "main": ""}}, "prompts.aux"),
        ({"agents": {"aux": "{", "main": ""}}, "prompts.aux"),
        ({"agents": {"system": "", "main": ""}}, "agents.system"),
        ({"agents": {"a b": ""}}, "agents: 'a b'"),
        ({"agents": ["aux", "main"]}, "agents"),
        ({"reward": None}, "reward"),
        ({"reward": lambda task: 0.0}, "reward"),
        ({"reward": 1.0}, "reward"),
        ({"reward": dict}, "reward.target"),
        ({"program": reward}, "program.target"),
        ({"config": "no_such_file"}, "config"),
    ],
)
def test_mistakes_are_user_errors_that_begin_with_the_key(given, key, tmp_path: Path) -> None:
    with pytest.raises(comlrl.UserError) as raised:
        train(tmp_path / "run", **given)
    message = str(raised.value)
    assert message.startswith(key) and "\n" not in message and "--" not in message


def test_a_program_is_refused_for_algorithms_that_have_none() -> None:
    with pytest.raises(comlrl.UserError, match=r"^program\.target"):
        comlrl.train("madpo", tasks=ROWS, agents=AGENTS, program=play)


def test_a_reward_that_raises_names_its_line(tmp_path: Path) -> None:
    def fails(task, answers):
        return 1 / 0

    with pytest.raises(comlrl.UserError, match=r"reward\.target: .*test_python_api\.py:\d+"):
        train(tmp_path / "run", reward=fails)


def test_ctrl_c_saves_and_resume_continues_as_if_nothing_was(
    run: comlrl.Run, tmp_path: Path
) -> None:
    calls = []

    def interrupts(task, answers):
        calls.append(task)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return reward(task, answers)

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match="resume=True"):
        train(folder, reward=interrupts)
    assert (folder / "checkpoints").is_dir()
    with pytest.raises(comlrl.UserError, match=r"modules\.json/reward.*resume=\"force\""):
        train(folder, resume=True)
    with pytest.raises(comlrl.UserError, match=r"modules\.json/tasks"):
        train(folder, reward=interrupts, tasks=ROWS[:2], resume=True)
    resumed = train(folder, reward=interrupts, resume=True)
    assert [r["reward_mean"] for r in resumed.metrics] == [r["reward_mean"] for r in run.metrics]


def test_overrides_of_an_evaluation_are_values_not_text(run: comlrl.Run, monkeypatch) -> None:
    monkeypatch.setattr(evaluate_command, "evaluate", lambda plan: plan.config.wandb)
    found = comlrl.evaluate(run, overrides={"wandb.project": "007", "wandb.name": "no"})
    assert (found.project, found.name) == ("007", "no")


def test_a_path_in_an_error_is_as_it_was_given() -> None:
    with pytest.raises(comlrl.UserError, match=r"^config: .*data/my--config/a--k\.yaml"):
        comlrl.train("magrpo", config="data/my--config/a--k.yaml")


def test_the_command_line_refuses_what_was_passed(run: comlrl.Run, capsys) -> None:
    import train_magrpo

    words = ["--config", str(run.path / "config.yaml"), "--resume"]
    assert train_command.main("magrpo", train_magrpo.build, words) == 2
    assert evaluate_command.main(["--checkpoint", str(run.path)]) == 2
    with pytest.raises(comlrl.UserError, match="domain: 'from Python'"):
        comlrl.evaluate(run.path)
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error")]
    assert len(errors) == 2 and all("'from Python'" in line for line in errors)


@pytest.mark.slow
def test_a_program_a_data_set_and_pass_at_k(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    played = train(tmp_path / "played", tasks=rows, program=play, reward=None)
    assert len(played.metrics) == 2
    scored = train(
        tmp_path / "scored", tasks={"train": ["def f():"], "eval": ["def g():"]}, reward=passing
    )
    result = comlrl.evaluate(scored, k=(1, 2))
    assert result["metrics"]["pass@1"] == result["metrics"]["pass@2"] == 1.0
    assert result["split"] == "eval" and result["samples"] == 2
    assert comlrl.evaluate(scored, tasks=["def x():"] * 3, greedy=True)["tasks"] == 3
    with pytest.raises(comlrl.UserError, match=r"^k: "):
        comlrl.evaluate(scored, k=0)
