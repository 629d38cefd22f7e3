"""The problems of `builtin:functions`: solvable, by nothing simpler, held out by combination."""

from __future__ import annotations

import ast
import copy
import json
import random
from collections import Counter

import pytest

from comlrl.builtin import FUNCTIONS, FUNCTIONS_STARTER, LEVELS
from comlrl.config.sections import DatasetConfig
from comlrl.rewards.code.domain import CODE
from comlrl.rewards.code.reward import CodeReward
from comlrl.tasks.datasets import load_tasks
from comlrl.types import JointAction
from tests.support.fakes import code_task
from tools.make_functions import STARTER_SIZES, main, make_split, written

FILES = FUNCTIONS | {f"starter {split}": path for split, path in FUNCTIONS_STARTER.items()}
ROWS = {s: [json.loads(line) for line in path.open()] for s, path in FILES.items()}
ALL = [row for rows in ROWS.values() for row in rows]
SIMPLE = (
    "{}", "len({})", "list({})", "{}[0]", "{}[-1]", "sorted({})", "sorted({})[::-1]", "{}[::-1]",
    "max({})", "min({})", "sum({})", "sum(len(x) for x in {})", "len(set({}))", "sorted(set({}))",
    "''.join({})", "'-'.join({})", "[x for x in {} if x]", "{}[:2]", "{}[1:]",
    "[len(x) for x in {}]",
)  # fmt: skip
PARTS = {"dictionaries": ("{}.values()", "list({}.values())"), "texts": ("{}.split()",)}


def parameter(row: dict) -> str:
    return ast.parse(row["prompt"]).body[0].args.args[0].arg


def cases(row: dict) -> list[tuple[object, object]]:
    """Arguments and answers of a row's tests."""
    asserts = ast.parse(row["test"]).body[0].body
    return [
        (ast.literal_eval(each.test.left.args[0]), ast.literal_eval(each.test.comparators[0]))
        for each in asserts
    ]


def passed(row: dict, code: str) -> list[bool]:
    """Whether an expression of the parameter passes each test."""
    function = eval(compile(f"lambda {parameter(row)}: {code}", "own", "eval"))
    results = []
    for value, answer in cases(row):
        try:
            results.append(function(value) == answer)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError):
            results.append(False)
    return results


def solution(row: dict) -> str:
    return row["canonical_solution"].removeprefix("    return ").strip()


def without_a_part(code: str) -> list[str]:
    """The solution without one of its filters, its map or its reduction."""
    tree = ast.parse(code, mode="eval")
    programs = []
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.ListComp)]
    for place, node in enumerate(lists):
        for field in ("ifs", "elt"):
            changed = copy.deepcopy(tree)
            other = [n for n in ast.walk(changed) if isinstance(n, ast.ListComp)][place]
            if field == "ifs":
                other.generators[0].ifs = []
            else:
                names = {n.id for n in ast.walk(node.generators[0].target) if hasattr(n, "id")}
                used = [n for n in ast.walk(node.elt) if getattr(n, "id", None) in names]
                other.elt = used[0]
            programs.append(ast.unparse(changed))
    programs.append(ast.unparse(lists[0]))
    return [program for program in programs if program != ast.unparse(tree)]


def test_the_shipped_files_are_what_the_maker_writes():
    for split, path in FUNCTIONS.items():
        assert written(make_split(split, 0)) == path.read_text(), split
    for split, path in FUNCTIONS_STARTER.items():
        assert written(make_split(split, 0, STARTER_SIZES)) == path.read_text(), split
    assert sum(path.stat().st_size for path in FUNCTIONS.values()) <= 1_000_000


def test_the_command_line_writes_other_problems(tmp_path, monkeypatch):
    sizes = {split: {"easy": 3, "hard": 1} for split in FUNCTIONS}
    monkeypatch.setattr("tools.make_functions.SIZES", sizes)
    assert main(["--seed", "5", "--out", str(tmp_path / "fresh")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "fresh" / "functions" / "eval.jsonl").open()]
    assert len(rows) == 4 and all(all(passed(row, solution(row))) for row in rows)


def test_other_problems_do_not_replace_the_shipped_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--seed", "5"])
    assert ended.value.code == 2 and "--out" in capsys.readouterr().err


def test_training_problems_of_any_seed_have_no_combination_of_the_shipped_evaluation():
    fresh = make_split("train", 7, {"train": {"easy": 100, "medium": 20}})
    assert not combinations(fresh) & combinations(ROWS["eval"])


@pytest.mark.parametrize("split", ROWS)
def test_solutions_pass_and_simpler_programs_do_not(split):
    for row in ROWS[split]:
        assert len(cases(row)) == 6 and all(passed(row, solution(row))), row
        answers = Counter(repr(answer) for _, answer in cases(row))
        assert max(answers.values()) <= 2, row  # of six: what a constant passes
        name = parameter(row)
        sources = [name, *(part.format(name) for part in PARTS.get(row["family"], ()))]
        simple = [program.format(source) for program in SIMPLE for source in sources]
        for program in [*simple, *without_a_part(solution(row))]:
            assert not all(passed(row, program)), (program, row)


def test_examples_are_right_and_are_no_tests():
    for row in ALL:
        lines = [line.strip() for line in row["prompt"].splitlines()]
        calls = [i for i, line in enumerate(lines) if line.startswith(">>>")]
        assert len(calls) == 2
        inputs = {repr(value) for value, _ in cases(row)}
        function = eval(f"lambda {parameter(row)}: {solution(row)}")
        for i in calls:
            argument = lines[i].partition("(")[2][:-1]
            assert argument not in inputs and repr(function(eval(argument))) == lines[i + 1]


def combinations(rows: list[dict]) -> set[tuple[str, ...]]:
    names = ("filter", "map", "reduction")
    return {tuple(row["parts"].get(name, "") for name in names) for row in rows}


def test_no_combination_is_in_two_splits():
    sets = {split: combinations(rows) for split, rows in ROWS.items()}
    assert not sets["train"] & sets["eval"] and not sets["train"] & sets["transfer"]
    assert not sets["starter train"] & sets["starter eval"]
    families = {split: {row["family"] for row in ROWS[split]} for split in FUNCTIONS}
    assert families["transfer"] == {"pairs"} and "pairs" not in families["train"]
    assert families["train"] == families["eval"] and len(families["train"]) == 4
    prompts = Counter(row["prompt"].partition(">>>")[0].partition('"""')[2] for row in ALL)
    assert len(prompts) > 0.9 * len(ALL)
    for name in ("filter", "map", "reduction"):  # each part of a held-out problem is trained
        known = {row["parts"].get(name) for row in ROWS["train"]}
        assert {row["parts"].get(name) for row in ROWS["eval"]} <= known


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("functions", (832, 128, 48)),
        ("functions-easy", (416, 64, 24)),
        ("functions-medium", (416, 64, 24)),
        ("functions-hard", (128, 16, 8)),
    ],
)
def test_levels_are_datasets(name, sizes):
    name = f"builtin:{name}"
    for split, size in zip(FUNCTIONS, sizes, strict=True):
        tasks = load_tasks(DatasetConfig(name=name), split, CODE)
        assert len(tasks) == size
        assert {task.fields["level"] for task in tasks} == set(LEVELS[name])
        for task in tasks[:5]:  # it has one name at any choice of levels
            assert ROWS[split][int(task.task_id.rpartition("_")[2])] == task.fields


def check_teams(rows: list[dict]) -> None:
    """Every team passes, and needs both agents where the problem can be divided."""
    actions = []
    for i, row in enumerate(rows):
        name, entry_point = parameter(row), row["entry_point"]
        helper, rest = row["team"]
        texts = (
            f"def aux({name}):\n    return {helper}\n",
            f"def {entry_point}({name}):\n    part = aux({name})\n    return {rest}\n",
        )
        task = code_task(str(i), row["prompt"], row["test"], entry_point)
        actions.append(JointAction(task, texts))
    with CodeReward(workers=2, measure_need=True) as reward:
        scores = reward.score(actions)
    for row, score in zip(rows, scores, strict=True):
        assert score.passed, row
        needed = ("aux", row["entry_point"]) if row["divisible"] else ("aux",)
        assert score.facts.needed == needed, row


def test_teams_solve_and_divide_a_sample():
    check_teams(random.Random(3).sample(ALL, 60))


@pytest.mark.slow
def test_teams_solve_and_divide_all():
    check_teams(ALL)
