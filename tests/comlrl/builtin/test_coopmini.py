"""CoopMini: reproducible, split by meaning, and rewarding agreement alone."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys

import pytest

from comlrl.builtin import COOPMINI
from comlrl.builtin.make_coopmini import MAKER, make_rows
from comlrl.builtin.operations import DOMAINS, REDUCTIONS, Operation
from comlrl.builtin.problems import CONVENTIONS, Problem, helper_source, main_source
from comlrl.tasks.prompts import Prompts
from rewards.code.conventions import convention, expected_convention
from rewards.code.domain import CODE
from tools.tiny_coder.demonstrations import demonstrations


def read(split: str) -> list[dict]:
    return [json.loads(line) for line in COOPMINI[split].read_text().splitlines()]


ROWS = read("train") + read("eval")


def problem_of(row: dict) -> Problem:
    """The problem whose ``key`` a row's ``operations`` is."""
    name, *codes = row["operations"].split(" | ")
    domain = next(d for d in DOMAINS if d.name == name)

    def find(groups, code: str, kind: str | None = None) -> Operation | None:
        fitting = (o for g in groups for o in g if o.code == code and kind in (None, o.gives))
        return None if code == "-" else next(fitting)

    mapped = find(domain.maps, codes[1])
    kind = mapped.gives if mapped else domain.element_type
    return Problem(domain, find(domain.filters, codes[0]), mapped, find(REDUCTIONS, codes[2], kind))


def passed(row: dict, aux: str, main: str) -> list[bool]:
    """Each assert of the row's check, run on aux and main put together."""
    scope: dict = {}
    exec(aux + main, scope)
    scope["candidate"] = scope[row["entry_point"]]
    results = []
    for line in row["test"].splitlines()[1:]:
        try:
            exec(line.strip(), scope)
            results.append(True)
        except Exception:
            results.append(False)
    return results


def test_the_shipped_splits_are_what_the_program_makes(tmp_path):
    paths = {split: tmp_path / f"{split}.jsonl" for split in COOPMINI}
    MAKER.write_shipped(paths)
    for split, path in paths.items():
        assert path.read_bytes() == COOPMINI[split].read_bytes()


def test_size_and_format():
    assert len(ROWS) >= 400
    assert len({row["task_id"] for row in ROWS}) == len(ROWS)
    assert {row["family"] for row in ROWS} == {d.name for d in DOMAINS}
    assert {row["stages"] for row in ROWS} == set(CONVENTIONS)
    for row in ROWS:
        assert row["prompt"].startswith(f"def {row['entry_point']}(")
        assert row["prompt"].count(">>>") == 2
        assert row["test"].startswith("def check(candidate):\n")
        assert row["test"].count("assert candidate(") >= 5
        assert passed(row, "", row["prompt"] + row["canonical_solution"]) == [True] * 6


def test_no_problem_is_shared_by_the_splits_or_appears_twice():
    train = [row["operations"] for row in read("train")]
    held_out = [row["operations"] for row in read("eval")]
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == len(held_out)
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_pair_of_conventions_scores_as_designed(split):
    for row in read(split):
        problem = problem_of(row)
        assert problem.key == row["operations"]
        for follows in row["conventions"]:
            for expects in row["conventions"]:
                aux = helper_source(problem, follows)
                main = main_source(problem, row["entry_point"], {expects: "aux"})
                outcomes = passed(row, aux, main)
                assert outcomes == [follows == expects] * 6, (row["task_id"], follows, expects)


def test_the_examples_of_the_docstring_are_true():
    for row in ROWS:
        scope: dict = {}
        exec(row["prompt"] + row["canonical_solution"], scope)
        lines = row["prompt"].splitlines()
        for call, answer in itertools.pairwise(lines):
            if ">>>" in call:
                assert eval(call.split(">>>")[1], scope) == eval(answer)


def test_conventions_are_read_from_the_code():
    for row in ROWS:
        problem = problem_of(row)
        for name in row["conventions"]:
            main = main_source(problem, row["entry_point"], {name: "aux"})
            assert convention(helper_source(problem, name)) == name
            assert expected_convention(main, row["entry_point"], row["stages"]) == name
        alone = main_source(problem, row["entry_point"], {})
        assert expected_convention(alone, row["entry_point"], row["stages"]) is None


def test_conventions_in_untidy_text():
    fenced = "Here:\n```\ndef aux(xs):\n    ys = [x for x in xs if x > 3]\n    return ys\n```"
    assert convention(fenced) == "filter"
    assert convention("def aux(n):\n    return not n % 2") == "test"
    assert convention("def aux(xs):\n    return sum(xs)") == "reduce"
    for nothing in ("", "no code", "def aux(xs:", "def aux():\n    return 1", "def aux(x):\n    x"):
        assert convention(nothing) is None
    assert expected_convention("def f(xs):\n    return sum(xs)", "f") is None
    assert expected_convention("def g(xs):\n    return aux(xs)", "f") is None


def test_fresh_problems_are_new_and_reproducible(tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        command = [sys.executable, "-m", "comlrl.builtin.make_coopmini"]
        command += ["--seed", "7", "--num", "30", "--out", str(file)]
        subprocess.run(command, check=True)
    assert files[0].read_bytes() == files[1].read_bytes()
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len({row["operations"] for row in rows} - MAKER.shipped()) == len(rows) == 30
    assert [r["operations"] for r in make_rows(8, 30)] != [r["operations"] for r in rows]


def test_too_many_problems_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"--num 100000: only \d+ such problems exist"):
        make_rows(0, 100_000, _everything_but(20))


def test_prompts_are_short():
    for row in ROWS:
        task = CODE.task(row["task_id"], row)
        assert all(len(prompt) < 600 for prompt in Prompts(CODE).first(task, 2))


def _everything_but(count: int) -> set[str]:
    """Keys of all problems of all domains, except a few."""
    keys = {
        Problem(domain, kept, mapped, reduced).key
        for domain in DOMAINS
        for kept in [None, *(o for g in domain.filters for o in g)]
        for mapped in [None, *(o for g in domain.maps for o in g)]
        for reduced in [None, *(o for g in REDUCTIONS for o in g)]
    }
    return keys - set(random.Random(0).sample(sorted(keys), count))


def test_pretraining_never_shows_an_eval_problem():
    """They are left out by what they compute, whatever their name and examples."""

    def asked(prompt: str) -> tuple[str, str]:
        return prompt.split("(")[1].split(")")[0], prompt.split('"""')[1].split("\n")[0]

    def shown(exclude: set[str]) -> set[tuple[str, str]]:
        stream = demonstrations(3, exclude, answers=1)
        return {asked(next(stream).prompt) for _ in range(2000)}

    held_out = {asked(row["prompt"]) for row in read("eval")}
    assert shown(set()) & held_out  # the stream would draw them
    assert not shown(MAKER.shipped("eval")) & held_out
