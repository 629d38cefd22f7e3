"""MARLHF: what each algorithm name means, the stop before RL, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from comlrl.config.algorithms import MAGRPOConfig, MARLHFConfig, PPOConfig
from comlrl.errors import UserError
from comlrl.evaluation.metrics import order_agreement
from comlrl.evaluation.outcomes import outcomes
from comlrl.loop import checkpoint
from comlrl.loop.steps import Gathered
from comlrl.loop.task_schedule import TaskSchedule
from comlrl.preferences.pairs import Pair, Round, TaskPairs
from comlrl.preferences.reward_model import Facts, ModelReward
from comlrl.preferences.reward_training import RewardBase
from comlrl.trainers.marlhf import MARLHFTrainer, text_pairs
from comlrl.types import Score, Tree
from tests.support import loops
from tests.support.fakes import task
from tests.support.made_runs import TASK, node
from tests.support.preferences import candidates
from tests.support.runs import ROOT, Zygote, metrics, resolved, small_of
from tests.support.tiny_trainers import Recorder

CONFIG = str(ROOT / "configs/marlhf_quickstart.yaml")


@pytest.mark.parametrize(
    ("name", "advantage"),
    [("magrpo", "mean"), ("reinforce", "raw"), ("rloo", "rloo"), ("remax", "greedy")],
)
def test_names_of_the_online_algorithm(name, advantage):
    section = resolved(CONFIG, f"marlhf.rl_algorithm={name}")[0].online
    assert isinstance(section, MAGRPOConfig) and section.advantage == advantage


def test_ppo_is_as_large_a_team_as_the_preferences_were_of():
    section = resolved(CONFIG, "marlhf.rl_algorithm=ppo", "ppo.ppo_epochs=2")[0].online
    assert isinstance(section, PPOConfig)
    assert (section.num_agents, section.ppo_epochs) == (2, 2)


def test_a_common_key_means_the_same_wherever_it_stands():
    config, *_ = resolved(CONFIG, "magrpo.max_steps=3", "marlhf.kl_coef=0.5")
    for section in (config.section, config.online):
        assert (section.max_steps, section.kl_coef) == (3, 0.5)
    # Said in both, the online algorithm's own counts …
    config, *_ = resolved(CONFIG, "magrpo.max_steps=3", "marlhf.max_steps=5")
    assert config.section.max_steps == config.online.max_steps == 3


def test_a_run_s_own_configuration_can_be_overridden(tmp_path):
    """… but the command line beats a file, in which both sections hold every key."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(resolved(CONFIG, "magrpo.max_steps=7")[0].to_dict()))
    config, *_ = resolved(path, "marlhf.max_steps=2")
    assert config.section.max_steps == config.online.max_steps == 2
    assert resolved(path)[0].online.max_steps == 7


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["marlhf.num_turns=2"], ["marlhf.num_turns", "single"]),
        (["magrpo.num_turns=2"], ["magrpo.num_turns", "single"]),
        (["marlhf.rl_algorithm=ppo", "ppo.num_turns=3"], ["ppo.num_turns"]),
        (["marlhf.rl_algorithm=rloo", "magrpo.advantage=max"], ["magrpo.advantage", "rloo"]),
        (["marlhf.rl_algorithm=ppo", "lora.dropout=0.1"], ["lora.dropout"]),
        (["marlhf.preference_holdout=0"], ["preference_holdout"]),
        (["marlhf.num_generations=1"], ["num_generations"]),
    ],
)
def test_refused_at_the_door(items, words):
    with pytest.raises(UserError) as refused:
        resolved(CONFIG, *items)
    assert all(word in str(refused.value) for word in words)


def test_agreement_counts_siblings_that_the_task_tells_apart():
    """Task rewards 0, 0.5, 0.5, 1 and scores 0, 1, 2, −1.

    The pair of equal rewards does not count; of the other five, 0 < 0.5 twice is ordered rightly
    (0 < 1, 0 < 2), and the three with the last, whose score is the lowest, wrongly: 2 of 5.
    """
    task_rewards = (0.0, 0.5, 0.5, 1.0)
    scores = [
        Score(v, task_reward=r) for v, r in zip((0.0, 1.0, 2.0, -1.0), task_rewards, strict=True)
    ]
    tree = Tree(TASK, (node(scores),), "align", None)
    assert order_agreement(outcomes(tree)) == {"reward_model/order_agreement": 2 / 5}
    alike = Tree(TASK, (node(scores[1:3]),), "align", None)
    assert order_agreement(outcomes(alike)) == {}


def test_texts_of_pairs_hold_all_agents_in_order():
    item = TaskPairs(candidates("a"), (Pair(1, 0, 1.0),), 0)
    ((winner, loser, gap),) = text_pairs([item])
    assert winner == "do a 0\na10 é\u2028\ndo a 1\na11 é\u2028\n"
    assert loser == "do a 0\na00 é\u2028\ndo a 1\na01 é\u2028\n"
    assert gap == 1.0


class FakeModel:
    """A reward model that has always read everything."""

    def __init__(self, facts):
        self.facts = facts

    def freeze(self):
        return

    def measure(self, labelled):
        self.facts.accuracy, self.facts.loss = 1.0, 0.0

    def order(self, tasks):
        return None

    def holds(self, text):
        return True

    def weights(self):
        return {}

    def save(self, folder):
        return


class FakeOnline:
    """Each step adds 1 to the weight; the part of a checkpoint is itself."""

    def __init__(self, loop):
        self.loop, self.weight, self.steps = loop, torch.zeros(1), []

    def step(self, step):
        self.steps.append((step.index, {t.task_id for t in step.tasks}, float(self.weight)))
        self.weight += 1
        span = self.loop.span(0)
        self.loop.record(
            step,
            Gathered(trees=(), env_steps=0, scored=0, tokens=0, span=span),
            updates=1,
            metrics={},
        )

    def parts(self):
        return {"agent": self}

    def state_tensors(self):
        return {"weight": self.weight}

    def load_tensors(self, tensors):
        self.weight = tensors["weight"]


class Labels:
    """Rounds of six tasks each: one whose candidates tie, one held out, four that are fitted to;
    or of ties alone."""

    labelled = 0

    def __init__(self, tasks_of, levels):
        self.tasks_of, self.levels = tasks_of, levels

    def round(self, index):
        level, sets = self.levels[index], []
        for n, given in enumerate(self.tasks_of(index)):
            rewards = (level, level + (0.5 if n and level else 0.0))
            pairs = (Pair(1, 0, 0.5),) if n and level else ()
            sets.append(TaskPairs(candidates(given.task_id, rewards), pairs, 0))
        useful = [item for item in sets if item.pairs]
        return Round(index, tuple(sets), tuple(useful[1:]), tuple(useful[:1]))

    def replayed(self, index):
        return []


LEVELS = [1.0, 2.0, 0.0, 2.0]


@pytest.fixture
def fits(monkeypatch) -> list[int]:
    """How many pairs each fit has had; nothing is fitted."""
    found: list[int] = []

    def fit(base, how, pairs, **_):
        found.append(len(pairs))
        return FakeModel(Facts(base="fake", max_length=64))

    monkeypatch.setattr("comlrl.trainers.marlhf.train", fit)
    monkeypatch.setattr("comlrl.trainers.marlhf.begin", lambda base, facts, *_: FakeModel(facts))
    return found


def in_rounds(folder: Path) -> MARLHFTrainer:
    """Four rounds of six tasks in three steps. The third's labels are of a team that has come to
    nothing."""
    section = MARLHFConfig(
        num_iterations=4, round_tasks=6, batch_size=2, num_train_epochs=1, eval_interval=0,
        save_steps=1, save_total_limit=None, pair_selection="all",
        preference_pairs_per_sample=None, reward_train_batch_size=4,
    )  # fmt: skip
    tasks = [task(f"t{n}") for n in range(12)]
    schedule = TaskSchedule(tasks, 2, 1, 0, rounds=4, round_tasks=6)
    loop = loops.loop(section, tasks, folder, Recorder(), schedule=schedule)
    folder.mkdir(exist_ok=True)
    (folder / "preferences_summary.json").write_text("{}")
    loop.advance = lambda step, online: online.step(step)  # type: ignore[method-assign]
    return MARLHFTrainer(
        section, loop, Labels(schedule.tasks_of, LEVELS), ModelReward(None, None), FakeOnline(loop),
        RewardBase(name="fake"), seed=0, resume=False,
    )  # fmt: skip


def test_a_team_that_falls_goes_back_and_only_fitted_tasks_are_learned_from(tmp_path, fits, capsys):
    """It gets the weights of the second round's start, 3 steps, and the third is left out."""
    made = in_rounds(tmp_path / "run")
    made.train()
    assert fits == [4, 4, 4]
    steps = made.online.steps
    assert [index for index, *_ in steps] == [1, 2, 3, 4, 5, 6, 10, 11, 12]
    assert [weight for *_, weight in steps] == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    for first, index in ((0, 0), (3, 1), (6, 3)):
        seen = [names for _, names, _ in steps[first : first + 3]]
        assert [len(names) for names in seen] == [2, 1, 1]
        assert set.union(*seen) == {item.task_id for item in made.collector.round(index).train}
    assert "round 3" in (output := capsys.readouterr().err) and "returns to the weights" in output


@pytest.mark.parametrize("at", [2, 3, 5, 6, 9, 11, 12])
def test_it_goes_on_from_any_checkpoint_with_the_round_to_go_back_to(tmp_path, fits, at):
    """Of a round's middle and end, and behind the round that was left out."""
    whole = in_rounds(tmp_path / "run")
    whole.train()
    made = in_rounds(tmp_path / "again")
    made.loop.resume(checkpoint.read(tmp_path / f"run/checkpoints/step_{at:06d}"), made)
    made.train()
    assert made.online.steps == [step for step in whole.online.steps if step[0] > at]
    assert made.loop.counters.env_steps == whole.loop.counters.env_steps == 4 * 6 * 2


def small(folder: Path, **keys) -> list[str]:
    """Everything that a run does, in seconds."""
    given = {
        "preference_num_candidates": 4, "preference_holdout": 0.3, "batch_size": 4,
        "max_steps": 2, "num_generations": 2, "max_new_tokens": 8, "eval_interval": 2,
        "eval_num_samples": 2, "save_steps": 1, "reward_min_accuracy": 0.0,
        "reward_num_train_epochs": 1, "num_iterations": 1, "round_tasks": None,
    } | keys  # fmt: skip
    items = [f"marlhf.{name}={json.dumps(value)}" for name, value in given.items()]
    return [
        "--config", CONFIG, "--override", f"output.dir={folder}", "lora.r=4",
        "dataset.train_split=train[:24]", "magrpo.lr_scheduler=constant",
        "magrpo.update_epochs=2", *items,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("marlhf") / "run"
    zygote.finish("marlhf", small(folder))
    return folder


def test_a_whole_run(whole):
    lines = metrics(whole)
    facts = json.loads((whole / "reward_model/reward_model.json").read_text())
    summary = json.loads((whole / "preferences_summary.json").read_text())
    assert lines[0]["metrics"]["reward_model/accuracy"] == facts["accuracy"]
    assert summary["reward_model_accuracy"] == facts["accuracy"]
    assert facts["base"] == "builtin:tiny-coder"
    # Candidates and online joint actions are environment steps: 24 · 4, then 4 tasks · G = 2.
    assert [line["step"] for line in lines if line["phase"] == "train"] == [96, 104, 112]
    steps = [line["metrics"] for line in lines if line["phase"] == "train"][1:]
    assert all("task_reward_mean" in m and m["reward_mean"] != m["task_reward_mean"] for m in steps)
    assert all(m["ratio_max"] > 1 for m in steps)  # the online stage goes over its samples twice
    assert [line["update"] for line in lines if line["phase"] == "train"][1:] == [2, 4]
    evaluations = [line["metrics"] for line in lines if line["phase"] == "eval"]
    assert len(evaluations) == 2
    for found in evaluations:  # the task's reward, and the model's beside it
        assert 0 <= found["reward_mean"] <= 4 and "model_score_mean" in found
    ends = json.loads((whole / "summary.json").read_text())
    assert ends["env_steps"] == ends["scored_joint_actions"] == 112


@pytest.mark.slow
def test_a_kept_reward_model_and_its_preferences_are_used_again(zygote, whole, tmp_path):
    folder = tmp_path / "again"
    keys = {"reward_model": str(whole / "reward_model"), "rl_algorithm": "remax"}
    zygote.finish("marlhf", small(folder, **keys))
    assert not (folder / "preferences.jsonl").exists() and not (folder / "reward_model").exists()
    one, other = (
        next(line["metrics"] for line in metrics(each) if line["phase"] == "eval")
        for each in (folder, whole)
    )
    assert one == other
    folder = tmp_path / "weak"
    keys = {"preferences": str(whole), "reward_min_accuracy": 1.0, "reward_learning_rate": 1e-9}
    run = zygote.finish("marlhf", small(folder, **keys), code=1)
    assert "marlhf.reward_min_accuracy=1.0" in run.error
    assert [line["phase"] for line in metrics(folder)] == ["train"]  # the reward model's line
    assert not (folder / "summary.json").exists()


@pytest.mark.slow
def test_resumed_online_it_keeps_its_reward_model(zygote, whole, tmp_path):
    folder = tmp_path / "run"
    zygote.finish("marlhf", small(folder, max_steps=1))
    before = (folder / "reward_model/reward_model.json").stat().st_mtime_ns
    zygote.finish("marlhf", [*small(folder), "--resume"])
    assert (folder / "reward_model/reward_model.json").stat().st_mtime_ns == before
    one = [line for line in metrics(folder) if line["phase"] == "train"]
    assert one == [line for line in metrics(whole) if line["phase"] == "train"]


@pytest.mark.slow
def test_a_round_with_too_few_pairs_trains_nothing_and_the_run_comes_to_its_end(zygote, tmp_path):
    """From the second round on no round has a batch of 600 pairs (18 tasks of 4: 108 at most)."""
    folder = tmp_path / "run"
    keys = {
        "num_iterations": 3, "round_tasks": 8, "num_train_epochs": 1, "max_steps": None,
        "reward_train_batch_size": 600,
    }  # fmt: skip
    run = zygote.finish("marlhf", small(folder, **keys))
    for number in (2, 3):
        assert f"round {number}: " in run.output
    assert run.output.count("are fewer than reward_train_batch_size=600") == 2
    assert "reward_max_length" not in run.output
    lines = metrics(folder)
    labelled = [line for line in lines if "preferences/labelled" in line["metrics"]]
    assert [line["metrics"]["preferences/labelled"] for line in labelled] == [32, 64, 96]
    assert ["reward_model/loss" in line["metrics"] for line in labelled] == [True, False, False]
    assert [line["update"] for line in lines if line["phase"] == "eval"] == [0, 4, 4, 4]
    summary = json.loads((folder / "summary.json").read_text())
    assert 3 * 32 < summary["env_steps"] < 3 * 32 + 2 * 8  # online on the tasks with pairs alone
    assert (folder / "final_model").exists()


@pytest.mark.parametrize("algorithm", ["madpo", "marlhf"])
def test_a_run_of_no_steps_evaluates_and_collects_nothing(zygote, tmp_path, algorithm):
    folder = tmp_path / "run"
    keys = [f"{algorithm}.num_train_epochs=0", f"{algorithm}.max_steps=null"]
    zygote.finish(algorithm, [*small_of(algorithm, folder), *keys])
    assert [line["phase"] for line in metrics(folder)] == ["eval"]
    assert not (folder / "preferences.jsonl").exists()
