"""The builtin posts: what the program makes, none of them in both splits, and fresh ones."""

from __future__ import annotations

import json

import pytest

from comlrl.builtin import POSTS
from comlrl.rewards.writing.writing_reward import WORDS
from tests.support.processes import python
from tools.make_posts import (
    MAKER,
    PEOPLE,
    TRIED,
    TROUBLES,
    make_rows,
)


def read(split: str) -> list[dict]:
    return [json.loads(line) for line in POSTS[split].read_text().splitlines()]


def test_the_shipped_splits_are_what_the_program_makes(tmp_path):
    paths = {split: tmp_path / f"{split}.jsonl" for split in POSTS}
    MAKER.write_shipped(paths)
    assert all(paths[s].read_bytes() == POSTS[s].read_bytes() for s in POSTS)


def test_no_situation_stands_twice():
    situations = [row["situation"] for split in POSTS for row in read(split)]
    assert len(set(situations)) == len(situations) == 256 + 64
    assert MAKER.shipped() == set(situations)


@pytest.mark.parametrize("split", POSTS)
def test_rows(split):
    for row in read(split):
        person, does, tried = row["situation"].split(" | ")
        title, post, end = row["prompt"].split("\n\n")
        assert title == f"TITLE: My {person} {does}" and end == "TL;DR:"
        assert post.startswith(f"POST: My {person} has been ") and tried in post
        assert WORDS[0] <= len(row["completion"].split()) < len(post.split())


def test_fresh_posts(tmp_path):
    out = tmp_path / "fresh.jsonl"
    python("tools/make_posts.py", "--seed", "7", "--num", "5", "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == make_rows(7, 5, MAKER.shipped()) != make_rows(8, 5, MAKER.shipped())
    assert not {row["situation"] for row in rows} & MAKER.shipped()


def test_all_the_posts_there_are(tmp_path):
    most = len(PEOPLE) * len(TROUBLES) * len(TRIED)
    assert len(make_rows(0, most)) == most
    none = tmp_path / "none.jsonl"
    done = python("tools/make_posts.py", "--num", str(most), "--out", none, code=2)
    assert not none.exists()
    message = f"error: --num {most}: only {most - 320} such posts exist; ask for fewer\n"
    assert done.stderr == message
