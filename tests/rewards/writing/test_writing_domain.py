"""The writing domain: rows, roles, prompts and the measures of a joint action."""

from __future__ import annotations

import json

import pytest

from comlrl.builtin import POSTS
from comlrl.config.sections import DatasetConfig
from comlrl.errors import UserError
from comlrl.rewards.writing.writing_domain import LARGEST_TEAM, WRITING
from comlrl.tasks.datasets import load_tasks
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt, JointAction, Score, Task
from tests.support.runs import ROOT, resolved

TASK = Task("post", {"prompt": "TITLE: Shoes\n\nPOST: A fox took them {all}.\n\nTL;DR:\n"})
TEXTS = ("a b c d e f g h", "but a b c d e f g h i j k l m n o")


def test_rows_are_posts_and_keep_their_other_fields():
    (task, *_), rows = (load_tasks(DatasetConfig(name="builtin:posts"), "eval", WRITING), POSTS)
    row = json.loads(rows["eval"].read_text().splitlines()[0])
    assert task.task_id == "Posts/eval/0" and dict(task.fields) == row
    assert WRITING.problem(task) == row["prompt"]


@pytest.mark.parametrize("prompt", [None, "", " \n", 3])
def test_a_row_without_a_post(prompt, tmp_path, capsys):
    with pytest.raises(ValueError, match="`prompt`"):
        WRITING.task("bad", {"prompt": prompt})
    file = tmp_path / "posts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("good", "")))
    section = DatasetConfig(name=str(file))
    with pytest.raises(UserError, match=r"line 2 .*`prompt`"):
        load_tasks(section, "train", WRITING)
    skipping = DatasetConfig(name=str(file), on_bad_row="skip")
    assert len(load_tasks(skipping, "train", WRITING)) == 1
    (notice,) = capsys.readouterr().err.splitlines()
    assert "`prompt`" in notice


def test_coding_problems_are_no_posts():
    """They have a `prompt` too, and are the default of dataset.name."""
    with pytest.raises(UserError, match=r"line 1 .*coding problem.*builtin:posts"):
        load_tasks(DatasetConfig(), "train", WRITING)


def test_roles():
    assert WRITING.roles(2) == ("concise", "detailed")
    assert WRITING.roles(4) == ("concise", "detailed", "detailed2", "detailed3")
    # 8 · 1.6^7 = 215 words, 8 · 1.6^8 = 344 are more than 256
    assert LARGEST_TEAM == 8
    for size in (0, 1, 9):
        with pytest.raises(ValueError, match="need 2 to 8 agents"):
            WRITING.roles(size)


@pytest.mark.parametrize("size", [2, 3])
def test_prompts(size):
    prompts = Prompts(WRITING)
    first = prompts.first(TASK, size)
    post = TASK.fields["prompt"].rstrip()
    assert len(first) == size and all(text.startswith(f"{post}\n\n") for text in first)
    assert "concise summary" in first[0] and all("longer summary" in text for text in first[1:])
    assert "in one or two sentences" in first[1]
    revision = prompts.revision_N(Attempt(TASK, ("",) * size, Score(0.0), 1))
    assert [text.split(" summary")[0] for text in revision] == [
        f"Write a revised {role}" for role in WRITING.roles(size)
    ]


def test_own_prompts():
    prompts = Prompts(WRITING, {"detailed": "{shorter} | {role} | {prompt}"})
    concise, detailed = prompts.first(TASK, 2)
    assert concise == Prompts(WRITING).first(TASK, 2)[0]
    assert detailed == f"one or two sentences | detailed | {TASK.fields['prompt'].rstrip()}"


def test_the_measures_of_a_joint_action():
    action = JointAction(TASK, TEXTS)
    (score,) = WRITING.reward().score([action])
    assert WRITING.measures(action, score) == {
        "length_ratio": 33 / 15,
        "unique_ratio": 16 / 8,
        "similarity": 7 / 13,  # "a", "i" and "but" carry nothing: b to h, of b to h and j to o
        "transition_kinds": 1,
        "words/concise": 8,
        "words/detailed": 16,
    }
    described = WRITING.described(score)
    assert json.loads(json.dumps(described))["steps"][0]["transitions"] == ["contrast"]
    assert score.value <= WRITING.greatest_reward(2)


def test_of_another_reward_it_tells_nothing():
    action, score = JointAction(TASK, TEXTS), Score(1.0, facts=("its own",))
    assert WRITING.measures(action, score) == {} and WRITING.described(score) == {}


def test_ratios_that_are_none_are_left_out():
    action = JointAction(TASK, ("", "but so"))
    (score,) = WRITING.reward().score([action])
    assert {"length_ratio", "unique_ratio"}.isdisjoint(WRITING.measures(action, score))


def test_settings_of_programs_have_no_effect_on_it():
    file = ROOT / "configs/magrpo_writing_quickstart.yaml"
    overrides = ["sandbox.timeout=3", "magrpo.num_turns=2", "external.sandbox_slice=2"]
    *_, notices = resolved(file, *overrides)
    assert sorted(notice.split(" has no effect")[0] for notice in notices) == [
        "external.sandbox_slice=2", "sandbox.timeout=3.0"
    ]  # fmt: skip
