"""CoopMini and its long problems: reproducible, split by meaning, and rewarding agreement alone."""

from __future__ import annotations

import itertools
import json
import random
import sys

import pytest

from comlrl.builtin import COOPMINI, COOPMINI_LONG
from comlrl.rewards.code.conventions import convention, expected_convention
from comlrl.rewards.code.domain import CODE
from comlrl.tasks.prompts import Prompts
from tests.support.processes import python
from tools.coopmini.operations import DOMAINS, REDUCTIONS, THENS, Operation
from tools.coopmini.problems import LONG, SHORT, Problem, helper_source, main_source
from tools.make_coopmini import LONG_MAKER, MAKER, make_rows
from tools.tiny_coder.demonstrations import demonstrations, draw_task


def read(split: str, files=COOPMINI) -> list[dict]:
    return [json.loads(line) for line in files[split].read_text().splitlines()]


ROWS = read("train") + read("eval")
LONG_ROWS = read("train", COOPMINI_LONG) + read("eval", COOPMINI_LONG)


def problem_of(row: dict) -> Problem:
    """The problem whose ``key`` a row's ``operations`` is."""
    name, *codes = row["operations"].split(" | ")
    domain = next(d for d in DOMAINS if d.name == name)

    def find(groups, code: str, kind: str | None = None) -> Operation | None:
        fitting = (o for g in groups for o in g if o.code == code and kind in (None, o.gives))
        return None if code == "-" else next(fitting)

    mapped = find(domain.maps, codes[1])
    kind = mapped.gives if mapped else domain.element_type
    then = find(THENS, codes[3], kind) if len(codes) == 4 else None
    reduced = find(REDUCTIONS, codes[2], kind)
    return Problem(
        domain=domain, filter=find(domain.filters, codes[0]), map=mapped, reduce=reduced, then=then
    )


def passed(row: dict, helpers: str, main: str) -> list[bool]:
    """Each assert of the row's check, run on the helpers and main put together."""
    scope: dict = {}
    exec(helpers + main, scope)
    scope["candidate"] = scope[row["entry_point"]]
    results = []
    for line in row["test"].splitlines()[1:]:
        try:
            exec(line.strip(), scope)
            results.append(True)
        except Exception:
            results.append(False)
    return results


@pytest.mark.parametrize("maker", [MAKER, pytest.param(LONG_MAKER, marks=pytest.mark.slow)])
def test_the_shipped_splits_are_what_the_program_makes(tmp_path, maker):
    paths = {split: tmp_path / f"{split}.jsonl" for split in maker.paths}
    maker.write_shipped(paths)
    for split, path in paths.items():
        assert path.read_bytes() == maker.paths[split].read_bytes()


@pytest.mark.parametrize(("rows", "count", "weights"), [(ROWS, 448, SHORT), (LONG_ROWS, 320, LONG)])
def test_size_and_format(rows, count, weights):
    assert len(rows) == count
    assert len({row["task_id"] for row in rows}) == count
    assert {row["family"] for row in rows} == {d.name for d in DOMAINS}
    assert {row["stages"] for row in rows} == set(weights)
    for row in rows:
        assert row["prompt"].startswith(f"def {row['entry_point']}(")
        assert row["prompt"].count(">>>") == 2
        assert row["test"].startswith("def check(candidate):\n")
        assert row["test"].count("assert candidate(") >= 5
        assert passed(row, "", row["prompt"] + row["canonical_solution"]) == [True] * 6


def test_no_problem_is_shared_by_splits_or_sets_or_appears_twice():
    operations = [row["operations"] for row in ROWS + LONG_ROWS]
    assert len(set(operations)) == len(operations)


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


@pytest.mark.parametrize("row", LONG_ROWS[::16], ids=lambda row: row["task_id"])
def test_long_teams_of_any_size_score_as_designed(row):
    """Each set of conventions that a main can rely on, with every one of its helpers' ways."""
    problem = problem_of(row)
    for expected in problem.shares:
        names = [f"aux{i + 1}" if i else "aux" for i in range(len(expected))]
        relied = dict(zip(expected, names, strict=True))
        main = main_source(problem, row["entry_point"], relied)
        assert all(f"{name}(" in main for name in names), main
        for follows in itertools.product(problem.conventions, repeat=len(expected)):
            if len(expected) < 3 or sum(map(str.__ne__, follows, expected)) < 2:
                helpers = [
                    helper_source(problem, f, n) for f, n in zip(follows, names, strict=True)
                ]
                assert passed(row, "".join(helpers), main) == [follows == expected] * 6, follows


def test_long_problems_have_work_for_as_many_helpers_as_stages():
    for row in LONG_ROWS:
        stages = row["stages"].count("_") + 1
        assert max(map(len, problem_of(row).shares)) == stages in (3, 4)


def test_the_examples_of_the_docstring_are_true():
    for row in ROWS + LONG_ROWS:
        scope: dict = {}
        exec(row["prompt"] + row["canonical_solution"], scope)
        lines = row["prompt"].splitlines()
        for call, answer in itertools.pairwise(lines):
            if ">>>" in call:
                assert eval(call.split(">>>")[1], scope) == eval(answer)


def test_conventions_are_read_from_the_code():
    for row in ROWS + LONG_ROWS:
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
        python("tools/make_coopmini.py", "--seed", "7", "--num", "30", "--out", file)
    assert files[0].read_bytes() == files[1].read_bytes()
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len({row["operations"] for row in rows} - MAKER.shipped()) == len(rows) == 30
    assert [r["operations"] for r in make_rows(8, 30)] != [r["operations"] for r in rows]


def test_fresh_long_problems(tmp_path, monkeypatch):
    file = tmp_path / "long.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["", "--long", "--seed", "7", "--num", "5", "--out", str(file)]
    )
    MAKER.main(long=LONG_MAKER)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["task_id"] for row in rows] == [f"CoopMiniLong/7/{i}" for i in range(5)]
    assert not {row["operations"] for row in rows} & LONG_MAKER.shipped()


def test_too_many_problems_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"--num 100000: only \d+ such problems exist"):
        make_rows(0, 100_000, _everything_but(20))


def test_prompts_are_short():
    for row in ROWS + LONG_ROWS:
        task = CODE.task(row["task_id"], row)
        assert all(len(prompt) < 600 for prompt in Prompts(CODE).first(task, 5))


def _everything_but(count: int) -> set[str]:
    """Keys of all problems of all domains, except a few."""
    keys = {
        Problem(domain=domain, filter=kept, map=mapped, reduce=reduced).key
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
    first, _ = draw_task(random.Random(0), set(), weights=LONG)
    other, _ = draw_task(random.Random(0), {first.key}, weights=LONG)
    assert first.key != other.key
