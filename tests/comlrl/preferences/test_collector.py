"""Pairs of joint candidates, their file, and a collection that is interrupted."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from comlrl.preferences.candidates import (
    Pair,
    PreferenceError,
    append_sets,
    drop_after,
    joint_texts,
    read_sets,
)
from comlrl.preferences.collector import Collector
from comlrl.preferences.pairs import Round, TaskPairs, hold_out, select_pairs
from comlrl.types import Completion, Message
from tests.support.fakes import PROMPTS, task
from tests.support.preferences import SECTION, candidates, collector


def chosen(rewards, selection="reward_gap", limit=None, shuffle=range):
    pairs, ties = select_pairs(rewards, selection, limit, shuffle)
    return [(p.winner, p.loser) for p in pairs], ties


def test_the_largest_gaps_first_and_of_equal_ones_the_least_used():
    # Gaps of 4: (0,3) (2,3); of 3: (0,1) (0,4) (2,1) (2,4); of 1: (1,3) (4,3). Ties: 0=2 and 1=4.
    # (0,3): nobody is used, lowest index. (2,3). Uses are now 0:1 2:1 3:2.
    # Of the gaps of 3 all have one use: (0,1). Then (0,4) has 2, (2,1) 2 and (2,4) 1: (2,4).
    # Then (0,4) has 2 + 1 and (2,1) 2 + 1: the lower index, (0,4).
    pairs, ties = chosen([4, 1, 4, 0, 1], limit=5)
    assert pairs == [(0, 3), (2, 3), (0, 1), (2, 4), (0, 4)]
    assert ties == 2


def test_sums_that_differ_in_the_last_bit_are_equal():
    assert chosen([0.1 + 0.2, 0.3]) == ([], 1)
    # Gaps of 0.2 to within rounding, whatever their last bits: 0.3 − 0.1 and 0.2 − 0.0.
    # (0,1) first; then (2,3), which is unused; by the last bits (2,3) might have been first.
    assert 0.3 - 0.1 != 0.2 - 0.0
    assert chosen([0.3, 0.1, 0.2, 0.0], limit=3)[0] == [(0, 3), (0, 1), (2, 3)]


@pytest.mark.parametrize("seed", range(20))
def test_selection_against_a_plain_one(seed):
    """One pick at a time, by looking at everything that is left."""
    generator = random.Random(seed)
    rewards = [generator.choice([0.0, 1.0, 1.5, 4.0]) for _ in range(9)]
    left = [(w, r) for w, r in itertools.permutations(range(9), 2) if rewards[w] > rewards[r]]
    uses, expected = [0] * 9, []
    for _ in range(min(7, len(left))):
        best = min(left, key=lambda p: (rewards[p[1]] - rewards[p[0]], uses[p[0]] + uses[p[1]], *p))
        left.remove(best)
        expected.append(best)
        for candidate in best:
            uses[candidate] += 1
    found, ties = chosen(rewards, limit=7)
    assert sorted(found) == sorted(expected)
    equal = sum(a == b for a, b in itertools.combinations(rewards, 2))
    assert ties == equal


def test_random_and_all():
    every = [(1, 0), (2, 0), (2, 1)]
    assert chosen([0, 1, 2], "all") == (every, 0)
    backwards = chosen([0, 1, 2], "random", 2, lambda count: range(count - 1, -1, -1))
    assert backwards[0] == [(2, 1), (2, 0)]


def test_a_limit_beyond_the_pairs_keeps_all():
    assert chosen([0, 1], limit=16)[0] == [(1, 0)]


def pairs_of(name: str, count: int) -> TaskPairs:
    return TaskPairs(candidates(name), (Pair(1, 0, 1.0),) * count, 0)


def test_whole_tasks_are_held_out():
    tasks = [pairs_of(str(n), n % 3) for n in range(30)]  # twenty of them have pairs
    train, held = hold_out(tasks, 0.1, 7)
    assert (len(train), len(held)) == (18, 2)
    assert not {t.task_id for t in train} & {t.task_id for t in held}
    assert all(t.pairs for t in (*train, *held))
    assert hold_out(tasks, 0.1, 8)[1] != held  # the seed decides
    assert hold_out(tasks, 0.0, 7)[1] == []
    assert len(hold_out(tasks[:3], 0.1, 7)[1]) == 1  # two tasks: one of them
    assert hold_out(tasks[:2], 0.1, 7)[1] == []  # one task alone is learned from


def test_what_is_held_out_was_never_fitted_and_never_will_be():
    """Twelve tasks, four a round, in three shuffled orders one after the other; some rounds leave
    tasks without pairs, which are decided when they have some."""
    generator, rounds = random.Random(3), []
    for index in range(9):
        names = [str(n) for n in range(12)]
        random.Random(index // 3).shuffle(names)
        at = 4 * (index % 3)
        tasks = [pairs_of(name, generator.randrange(3)) for name in names[at : at + 4]]
        train, held = hold_out(tasks, 0.25, 7, rounds)
        assert {t.task_id for t in (*train, *held)} == {t.task_id for t in tasks if t.pairs}
        assert len(held) == 1 or index >= 3 or len(train) < 2
        rounds.append(Round(index, tuple(tasks), tuple(train), tuple(held)))
    fitted = {t.task_id for made in rounds for t in made.train}
    held_out = {t.task_id for made in rounds for t in made.held_out}
    assert not fitted & held_out and 3 <= len(held_out) <= 5
    # Which of them is drawn anew in each round, not by its place alone.
    tasks = [pairs_of(str(n), 1) for n in range(10)]
    empty = [Round(n, (), (), ()) for n in range(8)]
    drawn = {hold_out(tasks, 0.1, 7, empty[:n])[1][0].task_id for n in range(8)}
    assert len(drawn) > 2


def test_the_file_gives_back_what_was_written(tmp_path):
    path = tmp_path / "preferences.jsonl"
    append_sets(path, [candidates("a")])
    append_sets(path, [candidates("b", (0.5, 0.5, 2.0))])
    assert read_sets(path, 2) == [candidates("a"), candidates("b", (0.5, 0.5, 2.0))]
    line = json.loads(path.read_text().split("\n")[0])
    assert line["prompts"][1] == [{"role": "user", "content": "do a 1"}]
    assert line["candidates"][1]["completions"] == ["a10 é\u2028", "a11 é\u2028"]
    assert line["candidates"][1]["reward"] == 1.0


def test_candidates_of_agents_in_order_hold_what_each_read(tmp_path):
    section = replace(SECTION, turn_order="sequential")
    made, sampler, _ = collector(tmp_path, section=section, names="AB")
    sets = [item.candidates for item in made.round(0).tasks]
    assert len(sampler.calls) == 2  # one for each agent, for both tasks
    for item in sets:
        assert item.prompts_N == tuple(
            (Message("user", text),) for text in PROMPTS.first(task(item.task_id), 2)
        )
        assert len({c.texts_N for c in item.candidates_K}) == 5
        for k, candidate in enumerate(item.candidates_K):
            first, second = candidate.texts_N
            assert item.read_by(0, k) == item.prompts_N[0]
            (read,) = item.read_by(1, k)
            assert read.content.startswith(item.prompts_N[1][0].content) and first in read.content
            assert second.split("|")[1] == str(k)  # below the first agent's k-th text
    assert read_sets(tmp_path / "preferences.jsonl", 2) == sets
    # The reward model reads every text once: the prompts are those of the task alone.
    for candidate, text in zip(sets[0].candidates_K, joint_texts(sets[0]), strict=True):
        assert text.count(candidate.texts_N[0]) == 1


# JSON's escape of a lone surrogate is in it.
PROMPT = '[{{"role": "user", "content": "p"}}]'
HAND = (
    f'{{{{"task_id": "t", "prompts": [{PROMPT}, {PROMPT}], "candidates": '
    '[{{"completions": ["a\\ud800", "b"], "reward": {}}}]}}'
)


def test_a_file_made_by_hand(tmp_path):
    path = tmp_path / "mine.jsonl"
    prompt = [{"role": "user", "content": "p"}]
    line = {
        "task_id": "t", "prompts": [prompt, prompt],
        "candidates": [{"completions": ["a\u2028", "b"], "reward": 2}],
    }  # fmt: skip
    path.write_text(json.dumps(line, ensure_ascii=False), encoding="utf-8")
    (found,) = read_sets(path, 2)
    assert found.candidates_K[0].completions_N[0] == Completion("a\u2028", (), True)
    assert joint_texts(found) == ["p\na\u2028\np\nb\n"]
    path.write_text(HAND.format("1"))
    assert read_sets(path, 2)[0].candidates_K[0].texts_N == ("a?", "b")  # for the tokenizer


@pytest.mark.parametrize(
    ("content", "agents", "words"),
    [
        ("{}\n", 2, "line 1"),
        ("nonsense\n", 2, "line 1"),
        (None, 3, "num_agents=3"),
        ("", 2, "line 1"),
        *((HAND.format(reward), 2, "line 1") for reward in ("Infinity", "NaN", "1" + "0" * 400)),
        (HAND.format("[" * 100_000), 2, "line 1"),
        (HAND.format(1).replace('"p"', "null", 1), 2, "line 1"),
        (HAND.format(1).replace(PROMPT.format(), "[]", 1), 2, "line 1"),
        (HAND.format(1).replace('"b"', '["b"]'), 2, "line 1"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, agents, words):
    path = tmp_path / "preferences.jsonl"
    if content is None:
        append_sets(path, [candidates("a")])
    else:
        path.write_text(content)
    with pytest.raises(PreferenceError, match=words) as refused:
        read_sets(path, agents)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.fixture(autouse=True)
def two_tasks_at_once(monkeypatch):
    monkeypatch.setattr("comlrl.preferences.pairs.AT_ONCE", 10)


def pairs(made: Collector, index: int = 0):
    found = made.round(index)
    return list(found.train), list(found.held_out)


def test_a_collection_is_batched_counted_and_summed_up(tmp_path, capsys):
    made, sampler, loop = collector(tmp_path / "run")
    train, held = pairs(made)
    assert sampler.calls == [[2, 2], [2, 2], [1, 1]]  # two tasks a call, both agents
    assert loop.counters.scored_joint_actions == 5 * 5
    assert loop.counters.env_steps == 0
    assert len(train) + len(held) == 5 and len(held) == 1
    summary = json.loads((tmp_path / "run/preferences_summary.json").read_text())
    # Rewards of a task's five candidates are n, n+3, n+6, n+9, n+12 mod 4: one value twice, so
    # that 9 of the 10 pairs are no ties; two are kept of each task.
    assert summary["candidates"] == 25 and summary["ties_dropped"] == 5
    assert (
        summary["pairs"] == sum(summary["gaps"].values()) == 10 and summary["held_out_pairs"] == 2
    )
    output = capsys.readouterr().err
    assert "4/5 tasks" in output and "tasks/s" in output and "left" in output


@pytest.mark.parametrize("tear", [False, True])
def test_an_interrupted_collection_goes_on_where_it_stopped(tmp_path, tear):
    undisturbed = pairs(collector(tmp_path / "undisturbed")[0])
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        pairs(collector(folder, stop=1)[0])
    path = folder / "preferences.jsonl"
    assert len(read_sets(path, 2)) == 2
    if tear:
        with path.open("a") as file:
            file.write('{"task_id": "C", "pro')
    made, sampler, loop = collector(folder, resume=True)
    assert pairs(made) == undisturbed
    assert sampler.calls == [[2, 2], [1, 1]]
    assert path.read_bytes() == (tmp_path / "undisturbed/preferences.jsonl").read_bytes()
    assert loop.counters.scored_joint_actions == 25


def test_without_resume_an_older_file_is_replaced(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    append_sets(folder / "preferences.jsonl", [candidates("A")])
    _, sampler, _ = (found := collector(folder))
    pairs(found[0])
    assert len(sampler.calls) == 3


def test_reading_back_samples_nothing(tmp_path, capsys):
    made, *_ = collector(tmp_path / "first")
    expected = pairs(made)
    for given in (tmp_path / "first", tmp_path / "first/preferences.jsonl"):
        section = replace(SECTION, preferences=str(given))
        made, sampler, loop = collector(tmp_path / "second", section=section)
        assert pairs(made) == expected
        assert sampler.calls == [] and loop.counters.scored_joint_actions == 0
    made, *_ = collector(tmp_path / "third", section=section, names="AZ")
    capsys.readouterr()
    train, held = pairs(made)
    assert [item.task_id for item in train] == ["A"] and held == []
    assert "no candidates for 1 of 2 tasks" in capsys.readouterr().err
    made, *_ = collector(tmp_path / "fourth", section=section, names="Z")
    with pytest.raises(PreferenceError, match="train_split"):
        pairs(made)


def test_a_resumed_run_refuses_other_preferences(tmp_path):
    made, _, loop = collector(tmp_path / "run")
    pairs(made)
    path = tmp_path / "run/preferences.jsonl"
    again, _, later = collector(tmp_path / "run", resume=True)
    later.counters = loop.counters  # as a checkpoint holds them
    pairs(again)
    assert later.counters.scored_joint_actions == 25  # counted once
    again = collector(tmp_path / "run", resume=True)[0]
    again.loop.counters = loop.counters
    path.write_bytes(path.read_bytes().replace(b'"reward": 1.0', b'"reward": 2.0'))
    with pytest.raises(PreferenceError, match="changed"):
        pairs(again)
    again = collector(tmp_path / "run", resume=True)[0]
    again.loop.counters = loop.counters
    path.unlink()
    with pytest.raises(PreferenceError, match="missing"):
        pairs(again)


def test_nothing_to_learn_says_so(tmp_path):
    made, *_ = collector(tmp_path / "run")
    made.rollout.reward.value = lambda *_: 1.0
    with pytest.raises(PreferenceError, match="preference_num_candidates"):
        pairs(made)


@pytest.mark.parametrize("torn", [b'{"round": 0, "tas', b"\0\0\0\n", b"garbage\n"])
def test_what_a_crash_left_of_a_line_is_dropped(tmp_path, torn):
    append_sets(path := tmp_path / "preferences.jsonl", [candidates("a")])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    drop_after(path, 0)
    assert path.read_bytes() == whole
