"""Programs in whole runs: configuration, logs, evaluation, resume, several processes."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest

from comlrl.files import read_lines
from comlrl.trainers.launch.commands import evaluate, train
from tests.support import tiny_models
from tests.support.documented import programs
from tests.support.runs import (
    SMALL,
    Zygote,
    assert_in_sync,
    assert_same,
    metrics,
    newest_step,
)

TEAM = '''
import asyncio

import openai

from comlrl.rewards.run_python import run_python


async def play(task, agents):
    """The first writes, the second reads it and, at random, asks for another."""
    text = await agents["writer"](task.fields["prompt"])
    for _ in range(2):
        reply = await agents["reader"](f"{text}")
        if len(reply) % 2:
            break
        text = await agents["writer"](f"{reply} again")
    return {"writer": float(len(text)), "reader": float(reply.count("e"))}


async def runs(task, agents):
    result = await asyncio.to_thread(run_python, await agents["writer"](agents.prompts["writer"]))
    await agents["reader"](result.report or "nothing")
    await agents.reward("writer", result.ok)
    return 1 / 0


async def calls_a_tool(task, agents):
    messages = [{"role": "user", "content": task.fields["prompt"]}]
    asked = await agents["writer"](messages)
    messages += [{"role": "assistant", "content": asked}, {"role": "tool", "content": "it is 4"}]
    return len(await agents["writer"](messages)) + len(await agents["reader"]("Is it?"))


async def calls_a_tool_by_a_client(task, agents):
    messages = [{"role": "user", "content": task.fields["prompt"]}]
    async with openai.AsyncOpenAI(base_url=agents.base_url, api_key=agents.api_key) as client:
        create = client.chat.completions.create
        asked = (await create(model="writer", messages=messages)).choices[0].message.content
        messages.append({"role": "assistant", "content": asked})
        messages.append({"role": "tool", "tool_call_id": "1", "content": "it is 4"})
        text = (await create(model="writer", messages=messages)).choices[0].message.content
    return len(text) + len(await agents["reader"]("Is it?"))


def plain(task, agents):
    return 0
'''

ALONE = """
async def alone(task, agents):
    names = list(agents)
    text = await agents[names[0]](task.fields["prompt"])
    await agents.reward(names[0], text.count("e"))
    return len(await agents[names[-1]](f"{text} again"))
"""


def config(folder: Path, target: str = "play", algorithm: str = "magrpo") -> Path:
    """A file beside its module; magrpo's agents sample apart."""
    (folder / "my_team.py").write_text(TEAM)
    file = folder / f"{algorithm}.yaml"
    file.write_text(
        f"program: {{target: my_team:{target}, agents: [writer, reader]}}\n"
        "sampling: {reader: {max_new_tokens: 4}}\n"
        f"{algorithm}: {{num_agents: 2}}\n"
    )
    return file


def arguments(file: Path, out: Path, *more: str, **section: object) -> list[str]:
    algorithm = file.stem
    keys = {f"{algorithm}.{name}": value for name, value in (SMALL | section).items()}
    keys |= {
        "output.dir": str(out),
        "lora.r": 4,
        "agent_model.torch_dtype": "float64",
    }  # no draw flips by rounding
    return [
        "--config", str(file), "--override", *(f"{k}={json.dumps(v)}" for k, v in keys.items()),
        *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def played(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run, and its file."""
    folder = tmp_path_factory.mktemp("played")
    file, out = config(folder), folder / "run"
    zygote.finish("magrpo", arguments(file, out, "output.verbose=true", batch_size=3, max_steps=2))
    return file, out


def test_what_a_run_logs(played):
    _, out = played
    train_line, *_ = [line for line in metrics(out) if line["phase"] == "train"]
    values = train_line["metrics"]
    assert values["joint_actions"] == train_line["step"] == 6
    agents = [values[f"agent_{i}/reward_mean"] for i in (0, 1)]
    assert sum(agents) / 2 == pytest.approx(values["reward_mean"])
    calls = values["agent_0/calls_mean"] + values["agent_1/calls_mean"]
    assert calls == pytest.approx(values["calls_mean"]) and values["failed_share"] == 0
    assert values["agent_1/completion_length_mean"] <= 4 < values["agent_0/completion_length_mean"]
    (sample, *_) = read_lines(out / "samples.jsonl")
    assert sample["roles_N"] == ["writer", "reader"] and sample["turn"] == 1
    first, second, *_ = sample["calls"]
    assert (first["agent"], second["agent"]) == ("writer", "reader")
    assert second["read"] == [{"role": "user", "content": first["wrote"]}]
    lines = [line for line in read_lines(out / "episodes.jsonl") if line["phase"] == "train"]
    assert len(lines) == 12 and {line["episode"] for line in lines} == {0, 1}
    assert json.loads((out / "domain.json").read_text())["roles"] == ["writer", "reader"]
    assert "1. writer" in (out / "report.html").read_text()
    assert (out / "my_team.py").read_text() == TEAM


def test_its_evaluation_and_replacements(played, tmp_path, capsys):
    _, out = played
    file = tmp_path / "e.json"
    given = ["--checkpoint", str(out), "--out", str(file)]
    given += ["--override", "dataset.eval_split=eval[:3]"]
    assert evaluate.main([*given, "--samples", "2"]) == 0
    result = json.loads(file.read_text())
    assert result["roles"] == ["writer", "reader"] and result["metrics"]["calls_mean"] >= 2
    assert result["budget"]["model_calls"] > 0
    assert evaluate.main([*given, "--replace", "reader=silent"]) == 0
    teams = json.loads(file.read_text())["coalitions"]
    assert [team["present"] for team in teams] == [[1], []]
    silent = teams[-1]["metrics"]
    assert silent["agent_1/reward_mean"] == 0.0 < silent["agent_0/reward_mean"]
    capsys.readouterr()


@pytest.fixture(scope="module")
def another(played: tuple[Path, Path], zygote: Zygote) -> Path:
    """A second run of the same program, which has learned more."""
    file, out = played[0], played[1].with_name("another")
    more = ["magrpo.eval_interval=0", "seed=7"]
    zygote.finish("magrpo", arguments(file, out, *more, max_steps=2, learning_rate=0.02))
    return out


def evaluated(file: Path, *given: object) -> dict:
    few = ["--override", "dataset.eval_split=eval[:3]", "seed=5"]
    assert evaluate.main([*map(str, given), "--out", str(file), *few]) == 0
    return json.loads(file.read_text())


@pytest.mark.slow
def test_cross_play_and_replacements_are_each_team_played_apart(played, another, tmp_path):
    """A program asks again by what it has read: later calls differ from pairing to pairing."""
    _, one = played
    crossed = evaluated(tmp_path / "x.json", "--cross-play", one, another)
    assert crossed["roles"] == ["writer", "reader"]
    replaced = evaluated(tmp_path / "r.json", "--checkpoint", one, "--replace", f"all={another}")
    of_present = {tuple(team["present"]): team["metrics"] for team in replaced["coalitions"]}
    names = ("reward_mean", "agent_0/reward_mean", "agent_1/reward_mean")
    for a, b in itertools.product(range(2), repeat=2):
        own = tuple(agent for agent, run in enumerate((a, b)) if run == 0)
        pairing = {name: crossed["matrices"][name][a][b] for name in names}
        assert pairing == {name: of_present[own][name] for name in names}
        if a == b:
            continue
        mixed = tmp_path / f"mixed_{a}{b}"
        mixed.mkdir()
        for agent, run in enumerate((a, b)):
            place = f"agent_{agent}"
            (mixed / place).symlink_to((one, another)[run] / "final_model" / place)
        given = ("--config", one / "config.yaml", "--checkpoint", mixed)
        apart = evaluated(tmp_path / "a.json", *given)["metrics"]
        assert pairing == pytest.approx({name: apart[name] for name in names})
        assert of_present[own]["calls_mean"] == apart["calls_mean"]
    assert len({*itertools.chain(*crossed["matrices"]["reward_mean"])}) > 2
    rewards = crossed["matrices"]["agent_1/reward_mean"]
    assert len({*itertools.chain(*rewards)}) > 1
    assert (tmp_path / "x.png").is_file()
    assert "2 agent(s), program `my_team:play`, temperature" in (tmp_path / "x.md").read_text()


def test_runs_of_different_programs_are_not_crossed(played, tmp_path, capsys):
    _, one = played
    other = tmp_path / "other"
    shutil.copytree(one, other)
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("my_team:play", "my_team:runs"))
    assert evaluate.main(["--cross-play", str(one), str(other)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: --cross-play: ") and "program.target" in error


def test_tools_rewards_in_the_middle_and_episodes_that_fail(zygote, tmp_path):
    file, out = config(tmp_path, "runs"), tmp_path / "run"
    more = ["program.on_error=zero", "magrpo.eval_interval=0"]
    zygote.finish("magrpo", arguments(file, out, *more, max_steps=1, num_generations=8))
    (line,) = metrics(out)
    assert line["metrics"]["failed_share"] == 1 and line["metrics"]["calls_mean"] == 2
    samples = read_lines(out / "samples.jsonl")
    assert samples
    for sample in samples:
        assert sample["error"].startswith("raised ZeroDivisionError"), sample


def chat_model(folder: Path, template: str) -> str:
    """A tiny model that reads messages by this template."""
    shutil.copytree(tiny_models.folder("qwen2", chat=True), folder)
    words = tiny_models.tokenizer()
    words.chat_template = template
    words.save_pretrained(folder)
    return f"agent_model.name={folder}"


@pytest.mark.parametrize("target", ["calls_a_tool", "calls_a_tool_by_a_client"])
def test_messages_of_tools_are_read_where_the_template_has_them(target, zygote, tmp_path):
    file, out = config(tmp_path, target), tmp_path / "run"
    more = ["magrpo.eval_interval=0", chat_model(tmp_path / "model", tiny_models.CHAT)]
    zygote.finish("magrpo", arguments(file, out, *more, max_steps=1))
    for sample in read_lines(out / "samples.jsonl"):
        first, second, third = sample["calls"]
        assert second["read"] == [  # what it has not read before
            {"role": "assistant", "content": first["wrote"]},
            {"role": "tool", "content": "it is 4"},
        ]
        assert [call["agent"] for call in (first, second, third)] == ["writer", "writer", "reader"]


WITHOUT_TOOLS = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("target", "template"),
    [
        ("calls_a_tool", WITHOUT_TOOLS),
        ("calls_a_tool_by_a_client", WITHOUT_TOOLS),
        ("calls_a_tool_by_a_client", STRICT),
    ],
)
def test_and_end_the_run_where_it_lacks_them(target, template, zygote, tmp_path):
    file, model = config(tmp_path, target), tmp_path / "model"
    more = ["magrpo.eval_interval=0", "program.on_error=zero", chat_model(model, template)]
    run = zygote.finish("magrpo", arguments(file, tmp_path / "run", *more, max_steps=1), code=2)
    assert run.error.startswith(f"the chat template of '{model}' does not support the role tool")


def test_an_error_names_task_and_episode(zygote, tmp_path):
    file = config(tmp_path)
    (tmp_path / "my_team.py").write_text("async def play(task, agents):\n    agents['wrtier']\n")
    given = arguments(file, tmp_path / "run", "magrpo.eval_interval=0")
    error = zygote.finish("magrpo", given, code=1).error
    assert error.startswith("program.target: 'my_team:play': task '")
    assert "', episode 1: it asks for the agent 'wrtier', which program.agents lacks;" in error
    assert error.endswith("did you mean `writer`?")


@pytest.mark.parametrize(("name", "calls"), [("my_team", 1), ("debate", 5)])
def test_the_examples_of_the_page_train(name, calls, zygote, tmp_path):
    for file, body in programs("programs.md").items():
        (tmp_path / file).write_text(body)
    given = ["--config", str(tmp_path / f"{name}.yaml"), "--override", "magrpo.batch_size=2"]
    zygote.finish("magrpo", [*given, f"output.dir={tmp_path / 'run'}"])
    (line,) = metrics(tmp_path / "run")
    assert line["metrics"]["calls_mean"] >= calls


@pytest.mark.parametrize(
    ("algorithm", "given", "message"),
    [
        ("magrpo", "magrpo.num_agents=3", "program.agents: ['writer', 'reader'] lists 2 names for"),
        (
            "magrpo",
            "magrpo.num_turns=2",
            "magrpo.num_turns: 2 with program.target, which decides w",
        ),
        (
            "magrpo",
            "program.target=my_team:plain",
            "program.target: 'my_team:plain' is not an `a",
        ),
        ("magrpo", "program.target=my_team:paly", "program.target: 'my_team:paly': `my_team` has"),
        ("magrpo", "program.agents=[a,a]", "program.agents: ['a', 'a']; use different names of"),
        ("magrpo", "program.max_calls=0", "program.max_calls: 0"),
        (
            "magrpo",
            "distributed.strategy=fsdp",
            "distributed.strategy: fsdp with generation.backend",
        ),
        (
            "magrpo",
            "sampling={aux: {top_k: 3}}",
            "sampling.aux: no agent has this role; there are",
        ),
        ("ppo", "ppo.turn_order=sequential", "ppo.turn_order: 'sequential' with program.target, w"),
        ("shppo", "seed=1", "program.target: 'my_team:play' with shppo, which cannot learn from a"),
        ("madpo", "seed=1", "program.target: 'my_team:play' with madpo, which cannot learn from a"),
        ("marlhf", "seed=1", "program.target: 'my_team:play' with marlhf, which cannot learn from"),
    ],
)
def test_what_is_refused_at_the_door(algorithm, given, message, tmp_path, capsys):
    file = config(tmp_path, algorithm=algorithm)
    code = train.main(algorithm, lambda run: None, [*arguments(file, tmp_path / "run"), given])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert (code, error.startswith(f"error: {message}")) == (2, True), error


def test_a_dry_run_says_what_it_cannot_know(tmp_path, capsys):
    given = ["--config", str(config(tmp_path)), "--dry-run"]
    assert train.main("magrpo", lambda run: None, given) == 0
    shown = capsys.readouterr().out
    assert "episodes" in shown and "completions ≤" in shown
    assert "not checked: program.target: 'my_team:play'; its calls are known once" in shown


MAPPO = {"critic": "centralized", "granularity": "turn", "kl_coef": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "keys"), [("magrpo", {}), ("ppo", MAPPO)])
def test_killed_and_resumed_it_ends_bit_equal(algorithm, keys, zygote, tmp_path):
    file = config(tmp_path, algorithm=algorithm)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    zygote.finish(algorithm, arguments(file, whole, max_steps=3, **keys))
    zygote.kill_and_resume(algorithm, arguments(file, folder, max_steps=3, **keys), folder)
    assert_same(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, MAPPO], ids=["IPPO", "MAPPO"])
def test_two_processes_train_by_ppo_as_one_does(keys, zygote, tmp_path):
    file = config(tmp_path, algorithm="ppo")
    one, two = tmp_path / "one", tmp_path / "two"
    more = {"batch_size": 3, "max_steps": 2, "ppo_epochs": 2, **keys}
    zygote.finish("ppo", arguments(file, one, **more))
    zygote.finish_team(2, "ppo", arguments(file, two, **more))
    assert_agree(one, two)


@pytest.mark.slow
def test_two_processes_do_what_one_does(played, zygote, tmp_path):
    file, out = played
    zygote.finish_team(2, "magrpo", arguments(file, tmp_path / "run", batch_size=3, max_steps=2))
    assert_agree(out, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mean", "rloo", "max", "greedy", "raw"])
@pytest.mark.parametrize(("algorithm", "names"), [("grpo", "writer"), ("magrpo", "writer, reader")])
def test_every_advantage_with_two_passes_and_a_divergence(algorithm, names, kind, zygote, tmp_path):
    """What each call is credited with, ``tests/trainers/test_program_credit.py`` computes."""
    file, out = config(tmp_path, "alone", algorithm), tmp_path / "run"
    (tmp_path / "my_team.py").write_text(ALONE)
    more = [f"program.agents=[{names}]", f"{algorithm}.num_agents={names.count(',') + 1}"]
    more += ["sampling={}", f"{algorithm}.eval_interval=0"]
    keys = {"advantage": kind, "update_epochs": 2, "kl_coef": 0.05, "max_steps": 2}
    zygote.finish(algorithm, arguments(file, out, *more, learning_rate=1e-2, **keys))
    for line in metrics(out):
        values = line["metrics"]
        assert line["update"] % 2 == 0 and values["kl"] > 0 and values["calls_mean"] > 1
        assert values["ratio_max"] >= 1 and values["gradient_norm"] > 0
        assert line["step"] == line["update"] / 2 * (6 if kind == "greedy" else 4)
    assert newest_step(out) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "tasks", "keys"),
    [
        ("magrpo", 1, {"update_epochs": 2, "kl_coef": 0.1}),
        ("magrpo", 2, {"advantage": "greedy", "entropy_coef": 0.01}),
        ("ppo", 2, {"ppo_epochs": 2}),
        ("ppo", 1, MAPPO),
    ],
    ids=["MAGRPO", "greedy", "IPPO", "MAPPO"],
)
def test_more_processes_than_tasks(algorithm, tasks, keys, zygote, tmp_path):
    """The third process plays nothing, and with one task the second neither."""
    file = config(tmp_path, algorithm=algorithm)
    one, three = tmp_path / "one", tmp_path / "three"
    more = {"batch_size": tasks, "max_steps": 2, **keys}
    zygote.finish(algorithm, arguments(file, one, **more))
    zygote.finish_team(3, algorithm, arguments(file, three, **more))
    assert_agree(one, three)
    assert_in_sync(three, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "keys"), [("magrpo", {}), ("ppo", MAPPO)])
def test_two_processes_are_killed_and_resumed_bit_equal(algorithm, keys, zygote, tmp_path):
    file = config(tmp_path, algorithm=algorithm)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    more = {"batch_size": 3, "max_steps": 3, "eval_num_samples": 3, **keys}
    zygote.finish_team(2, algorithm, arguments(file, whole, **more))
    zygote.kill_and_resume(algorithm, arguments(file, folder, **more), folder, size=2)
    assert_same(folder, whole)


FAILS = """
import os


def fails():
    return 1 / (FAILING - int(os.environ["RANK"]))


async def by_itself(task, agents):
    await agents["writer"]("x")
    return fails()


async def by_its_reward(task, agents):
    return await agents.score([await agents[name]("x") for name in agents])


class Reward:
    def score(self, actions):
        return [fails() for _ in actions]


if __name__ == "__main__":
    print(1.0)
    raise SystemExit(FAILING == int(os.environ["RANK"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("program", "key", "why"),
    [
        ("target: my_team:by_itself", "program.target: 'my_team:by_itself': task '", "raised Zero"),
        ("target: my_team:by_its_reward", "reward.target: 'my_team:Reward'", "raised Zero"),
        ("command: {python} {folder}/my_team.py", "program.command: '", "ended with status 1"),
    ],
    ids=["program", "reward", "command"],
)
def test_an_error_in_one_process_ends_all_in_a_line(program, key, why, failing, zygote, tmp_path):
    file = config(tmp_path)
    own = program.format(python=sys.executable, folder=tmp_path)
    file.write_text(file.read_text().replace("target: my_team:play", own))
    (tmp_path / "my_team.py").write_text(FAILS.replace("FAILING", str(failing)))
    more = ["magrpo.eval_interval=0", "reward.target=my_team:Reward"]
    team = zygote.run_team(2, "magrpo", arguments(file, tmp_path / "run", *more))
    assert [process.wait() for process in team] != [0, 0]
    together = "".join(process.output for process in team)
    assert "Traceback" not in together and "gloo" not in together, together
    (line,) = [line for line in together.splitlines() if line.startswith("error: ")]
    assert key in line and why in line
    assert ("interrupted: another process ended" in together) == bool(failing)


def assert_agree(alone, together):
    one, two = metrics(alone), metrics(together)
    assert [{**line, "metrics": 0} for line in one] == [{**line, "metrics": 0} for line in two]
    for line, other in zip(one, two, strict=True):
        for name in ("reward_mean", "calls_mean", "agent_1/calls_mean"):
            assert other["metrics"][name] == pytest.approx(line["metrics"][name], rel=1e-3), name
