"""The arena's rows: what the program makes, held out where it is asked, and fresh ones."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from comlrl.builtin import DATASETS
from comlrl.rewards.arena.shards import NAMES as NAMES_OF_HOLDERS
from comlrl.rewards.arena.shards import right_answer
from tests.support.processes import python
from tools.make_arena import SHIPPED, rows, write_shipped

NAMES = [f"builtin:arena-{game}" for game in SHIPPED]


def test_the_shipped_splits_are_what_the_program_makes(tmp_path):
    paths = {n: {s: tmp_path / f"{n[8:]}_{s}" for s in DATASETS[n]} for n in NAMES}
    write_shipped(paths)
    for name in NAMES:
        for split, path in DATASETS[name].items():
            assert paths[name][split].read_bytes() == path.read_bytes(), (name, split)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_each_of_two_holders_is_right_in_half_of_the_rows_of_shards(split):
    """Else a judge that always names one of them would not score the floor."""
    text = DATASETS["builtin:arena-shards"][split].read_text()
    numbers = [json.loads(line)["numbers"] for line in text.splitlines()]
    assert sum(first > second for first, second, *_ in numbers) == len(numbers) / 2


@pytest.mark.parametrize("question", ["largest", "median"])
def test_each_of_any_holders_is_right_equally_often_in_evaluation_rows(question):
    found = [row["numbers"] for row in rows("shards", 64, evaluation=True, question=question)]
    for holders in range(2, 9):
        right = Counter(right_answer(numbers[:holders], question) for numbers in found)
        counts = [right[name.lower()] for name in NAMES_OF_HOLDERS[:holders]]
        uneven = max(counts) - min(counts)
        assert uneven <= (0 if holders in (2, 4, 8) else 2), (holders, counts)


def test_shards_evaluation_numbers_are_in_no_training_row():
    """For two holders, and so for more."""
    read = {
        split: [json.loads(line)["numbers"] for line in path.read_text().splitlines()]
        for split, path in DATASETS["builtin:arena-shards"].items()
    }
    pairs = {split: {tuple(numbers[:2]) for numbers in found} for split, found in read.items()}
    assert not pairs["train"] & pairs["eval"]
    assert len(pairs["train"] | pairs["eval"]) == 72 and len(pairs["eval"]) == 16


@pytest.mark.parametrize("evaluation", [False, True])
def test_rows_of_pairs_are_half_and_half(evaluation):
    for holders in (2, 5):
        found = rows("shards", 20, evaluation=evaluation, question="pair", holders=holders)
        twice = [len(set(row["numbers"])) < holders for row in found]
        assert twice == [False, True] * 10


def test_fresh_rows(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = ["--symbols", "4", "--letters", "1", "--num", "6", "--out", out]
    python("tools/make_arena.py", "codebook", *options)
    read = [json.loads(line) for line in out.read_text().splitlines()]
    assert read == rows("codebook", 6, symbols=4, letters=1)
    assert [row["symbol"] for row in read] == ["cat", "sun", "key", "boat", "cat", "sun"]
    assert rows("shards", 5, seed=1) == rows("shards", 5, seed=1) != rows("shards", 5, seed=2)
    done = python("tools/make_arena.py", "codebook", code=2)
    assert "--num (at least 1) and --out are needed" in done.stderr
