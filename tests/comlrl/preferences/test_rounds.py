"""Rounds: which tasks, which earlier pairs, and the labels of each in one file."""

from __future__ import annotations

import json

import pytest

from comlrl.loop.task_schedule import TaskSchedule
from comlrl.preferences.candidates import PreferenceError, read_sets
from comlrl.preferences.replay import replay_weights
from tests.support.fakes import task
from tests.support.preferences import SECTION, collector


def names(tasks) -> str:
    return "".join(t.task_id for t in tasks)


@pytest.mark.parametrize(
    ("kind", "rounds", "expected"),
    [
        ("current", None, {}),
        ("last_k", 2, {2: 1.0, 3: 1.0}),
        ("last_k", 9, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}),
        ("all", None, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}),
        # ages 4, 3, 2, 1 at 0.5^age
        ("lambda_decay", None, {0: 0.0625, 1: 0.125, 2: 0.25, 3: 0.5}),
        ("lambda_decay", 1, {3: 0.5}),
    ],
)
def test_what_is_replayed_in_the_fifth_round(kind, rounds, expected):
    assert replay_weights(kind, 4, rounds, 0.5) == expected
    assert replay_weights(kind, 0, rounds, 0.5) == {}


def test_one_round_is_shuffled_epochs():
    schedule = TaskSchedule([task(n) for n in "ABCDE"], 2, 2, seed=3)
    assert schedule.steps == 6
    epochs = [schedule.at(step) for step in range(6)]
    assert [epoch for epoch, _ in epochs] == [0, 0, 0, 1, 1, 1]
    assert [len(tasks) for _, tasks in epochs] == [2, 2, 1] * 2
    for first in (0, 3):
        assert sorted(names(t for _, ts in epochs[first : first + 3] for t in ts)) == list("ABCDE")
    assert {schedule.round_of(step) for step in range(9)} == {0}


def test_rounds_share_the_tasks_and_pass_over_their_own():
    """Five tasks, two a round: 2, 2, 1, then anew; two passes in steps of one task."""
    schedule = TaskSchedule([task(n) for n in "ABCDE"], 1, 2, seed=3, rounds=4, round_tasks=2)
    assert schedule.steps == 2 * (2 + 2 + 1 + 2)
    rounds = [names(schedule.tasks_of(r)) for r in range(4)]
    assert sorted("".join(rounds[:3])) == list("ABCDE") and len(rounds[3]) == 2
    assert [schedule.round_of(s) for s in range(14)] == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 4
    for step in range(14):
        epoch, tasks = schedule.at(step)
        assert names(tasks) in rounds[schedule.round_of(step)]
        assert epoch == (0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7, 7)[step]
    assert [schedule.part_of(s) for s in (0, 1, 2, 8, 9)] == [
        (0, 2),
        (1, 2),
        (0, 2),
        (0, 1),
        (0, 1),
    ]


def test_without_passes_the_steps_are_divided_among_the_rounds():
    schedule = TaskSchedule([task(n) for n in "ABCD"], 2, None, seed=3, rounds=3, max_steps=7)
    assert [schedule.round_of(s) for s in range(8)] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert schedule.steps is None and schedule.end_of(0) == 2


def test_no_two_rounds_share_an_epoch_where_the_steps_are_divided():
    """Three steps a round, two a pass: one pass and half of the next, which is not gone on with."""
    schedule = TaskSchedule(
        [task(n) for n in "ABCDEFGH"], 2, None, seed=3, rounds=2, round_tasks=4, max_steps=6
    )
    assert [schedule.at(step)[0] for step in range(6)] == [0, 0, 1, 2, 2, 3]
    assert [schedule.start_of(r) for r in range(2)] == [0, 3]


def test_rounds_lie_in_one_file_and_those_after_the_checkpoint_are_cut_off(tmp_path):
    made, sampler, loop = collector(tmp_path / "run")
    rounds = [made.round(r) for r in range(3)]
    assert made.labelled == loop.counters.scored_joint_actions == 3 * 25
    path = tmp_path / "run/preferences.jsonl"
    assert [item.round for item in read_sets(path, 2)] == [0] * 5 + [1] * 5 + [2] * 5
    whole = path.read_bytes()
    again, sampler, later = collector(tmp_path / "run", resume=True)
    later.counters = loop.counters
    lines = whole.splitlines(keepends=True)
    # A checkpoint within the second round, whose process was killed in the third.
    content = b"".join(lines[:10])
    loop.counters.extra["preferences"] |= _remembered(content, rounds=2)
    loop.counters.scored_joint_actions = 50
    assert again.round(1) == rounds[1] and sampler.calls == []
    assert path.read_bytes() == content
    assert again.round(2) == rounds[2] and path.read_bytes() == whole
    assert loop.counters.scored_joint_actions == 75
    assert [(r.index, w) for r, w in again.replayed(2)] == []


def _remembered(content: bytes, rounds: int) -> dict:
    import hashlib

    digest = hashlib.sha256(content).hexdigest()
    return {"rounds": rounds, "bytes": len(content), "sha256": digest}


def test_lines_tell_their_round_and_those_of_a_comparator_are_refused(tmp_path):
    made, *_ = collector(tmp_path / "run", section=SECTION)
    made.round(0)
    path = tmp_path / "run/preferences.jsonl"
    line = json.loads(path.read_text().split("\n")[0])
    assert line["round"] == 0
    path.write_text(json.dumps(line | {"pairs": [[0, 1]], "ties": 0}) + "\n")
    with pytest.raises(PreferenceError, match=r"line 1 .* comparator"):
        read_sets(path, 2)
