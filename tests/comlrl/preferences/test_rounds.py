"""Rounds: which tasks, which earlier pairs, who compares, and the labels of each in one file."""

from __future__ import annotations

import json

import pytest

from comlrl.loop.task_schedule import TaskSchedule
from comlrl.preferences.candidates import CandidateSet, JointCandidate, Pair, read_sets
from comlrl.preferences.comparing import EarlierTeam, compared
from comlrl.preferences.replay import replay_weights
from comlrl.types import Completion, Message, Score, Shape
from tests.support.fakes import SAMPLING, task
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


def candidates(rewards, texts) -> CandidateSet:
    made = tuple(
        JointCandidate((Completion(t, (), True), Completion("-", (), True)), r)
        for t, r in zip(texts, rewards, strict=True)
    )
    prompts = tuple((Message("user", name),) for name in "pq")
    return CandidateSet(task_id="t", prompts_N=prompts, candidates_K=made)


def test_another_than_the_task_reward_compares():
    """A judge that likes long texts: "aaa" > "aa" > "a"; equal texts are not asked about."""
    asked = []

    def longest(given, texts_P):
        asked.extend(texts_P)
        return [(len(a[0]) > len(b[0])) - (len(a[0]) < len(b[0])) for a, b in texts_P]

    made = candidates([4.0, 0.0, 1.0, 0.0], ["a", "aa", "aaa", "aa"])
    found = compared(task("t"), made, None, longest, seed=1).verdicts
    # 6 pairs: 1 of equal texts. Gaps are of the task reward, which the judge does not follow.
    assert len(asked) == 5 and found.ties == 1
    assert sorted((p.winner, p.loser, p.gap) for p in found.pairs) == [
        (1, 0, -4.0), (2, 0, -3.0), (2, 1, 1.0), (2, 3, 1.0), (3, 0, -4.0),
    ]  # fmt: skip
    assert len(compared(task("t"), made, 2, longest, seed=1).verdicts.pairs) <= 2
    nobody = compared(task("t"), made, None, lambda t, texts_P: [0] * len(texts_P), seed=1)
    assert nobody.verdicts.pairs == () and nobody.verdicts.ties == 6
    mute = compared(task("t"), made, None, lambda t, texts_P: [None] * len(texts_P), seed=1)
    assert (mute.verdicts.ties, mute.verdicts.unreadable) == (6, 5)


def test_an_earlier_team_is_what_both_are_held_against(tmp_path):
    """Its five answers to A earn 1, 0, 3, 2, 1 (see ``reward`` of test_collector). A text that
    earns 2 beats three and ties with one: 3.5; one that earns 3 has 4.5, one that earns 1 has 2."""
    made, *_ = collector(tmp_path)
    score = made.rollout.reward.score
    worth = {("two", "-"): 2.0, ("three", "-"): 3.0, ("one", "-"): 1.0, ("2", "-"): 2.0}

    def scored(actions):
        if actions[0].completions_N not in worth:
            return score(actions)
        return [Score(worth[action.completions_N]) for action in actions]

    made.rollout.reward.score = scored
    earlier = EarlierTeam(made.rollout, SAMPLING, Shape(2, 1, 5))
    two, three, one, again = worth
    asked = [(two, three), (two, one), (two, again)]
    assert earlier(task("A"), asked) == [-1, 1, 0]
    assert sorted(earlier._rewards["A"]) == [0.0, 1.0, 1.0, 2.0, 3.0]


def test_joined_candidates_keep_their_verdicts():
    one = compared(task("t"), candidates([0, 1], ["a", "b"]), None, lambda t, p: [1] * len(p), 1)
    two = one.joined(one)
    (pair,) = one.verdicts.pairs
    assert two.verdicts.pairs == (pair, Pair(pair.winner + 2, pair.loser + 2, pair.gap))
    assert len(two.candidates_K) == 4


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


def test_lines_tell_their_round_and_their_verdicts(tmp_path):
    made, *_ = collector(tmp_path / "run", section=SECTION)
    made.comparator = lambda given, texts_P: [1] * len(texts_P)
    found = made.round(0)
    line = json.loads((tmp_path / "run/preferences.jsonl").read_text().split("\n")[0])
    # Two of ten pairs are asked about (preference_pairs_per_sample=2).
    assert line["round"] == 0 and len(line["pairs"]) + line["ties"] == 2
    again, *_ = collector(tmp_path / "run", resume=True)
    assert again.round(0) == found
