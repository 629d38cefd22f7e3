"""What counts as a test, and what is set-up."""

from __future__ import annotations

import json

import pytest

from comlrl.rewards.code.domain import CODE
from comlrl.rewards.code.reward import CodeReward
from comlrl.rewards.sandbox.checks import TestError, split_check
from comlrl.types import JointAction, Task


def sources(body: str, entry_point: str = "f", module: str = "") -> list[str]:
    lines = "\n".join("    " + line for line in body.split("\n"))
    return [
        s.source
        for s in split_check(f"{module}\ndef check(candidate):\n{lines}\n", entry_point).tests
    ]


def test_asserts_that_mention_the_function():
    body = "assert candidate(1) == 2\nassert f(2) == 3\nassert True\nassert g(1)"
    assert sources(body) == ["assert candidate(1) == 2", "assert f(2) == 3"]


def test_multi_line_asserts_and_loops_are_one_test_each():
    assert len(sources("assert candidate(\n1\n) == (\n2\n), 'no'")) == 1
    assert (
        len(
            sources(
                "for x in range(3):\n    assert candidate(x) == x\n    assert candidate(-x) == x"
            )
        )
        == 1
    )


def test_names_that_set_up_bound():
    assert len(sources("solution = candidate(1)\nassert solution == 1\nassert other == 1")) == 1
    assert (
        len(sources("out = []\nfor x in [1]:\n    out.append(candidate(x))\nassert out == [1]"))
        == 1
    )


def test_calling_a_function_that_asserts_is_asserting():
    module = "def close(a, b):\n    assert abs(a - b) < 1e-6"
    assert sources("close(candidate(1), 1.0)\nclose(1, 1)", module=module) == [
        "close(candidate(1), 1.0)"
    ]
    # the definition itself asserts nothing yet
    assert sources("def ask(x):\n    assert candidate(x) == x\nask(1)\nask(2)") == [
        "ask(1)",
        "ask(2)",
    ]


def test_other_parameter_names_and_a_return():
    check = split_check(
        "def check(g):\n    assert g(1) == 1\n    return\n    assert g(2) == 2\ncheck(f)", "f"
    )
    assert (check.parameter, len(check.tests)) == ("g", 1)


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("def check(candidate):\n    assert candidate(", "does not compile"),
        (
            "def check(candidate):\n    if 1:\n        return\n    assert candidate()",
            "does not compile",
        ),
        ("assert f(1) == 1", "defines no `check"),
        ("def check():\n    assert f(1)", "takes no argument"),
        ("def check(candidate):\n    assert True", "no assert that mentions"),
        ("def check(candidate):\n    pass\0", "does not compile"),
        (f"def check(candidate):\n    assert candidate({'1 + ' * 700}1)", "does not compile"),
    ],
)
def test_useless_tests_name_the_row(test, says):
    """The domain says what is wrong with which field, the reward with which task."""
    row = {"prompt": "def f():\n    pass\n", "test": test, "entry_point": "f"}
    with pytest.raises(TestError, match=f"{says}.*; fix its `test`$"):
        CODE.task("Row/7", row)
    with CodeReward(workers=1) as reward, pytest.raises(TestError, match=says) as error:
        reward.score([JointAction(Task("Row/7", row), ("def f(): return 1",))])
    assert "task 'Row/7'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["HumanEval", "CoopHumanEval"])
def test_every_row_has_tests(shared_data, name):
    counts = {}
    for line in (shared_data / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        counts[row["task_id"]] = len(split_check(row["test"], row["entry_point"]).tests)
    assert min(counts.values()) >= 1
    if name == "HumanEval":
        # read off the file: loops that assert in 32, 38, 44, 50 and 53
        assert {i: counts[f"HumanEval/{i}"] for i in (0, 32, 33, 38, 44, 50, 53)} == {
            0: 7, 32: 1, 33: 7, 38: 1, 44: 7, 50: 1, 53: 6
        }  # fmt: skip


def test_arguments_of_a_call_whose_result_is_dropped_are_under_test():
    body = "    xs = [2]\n    candidate(xs, key=d.x)\n    assert xs\n    assert d\n    assert e\n"
    check = split_check(f"e = d = 1\ndef check(candidate):\n{body}", "f")
    assert [s.source for s in check.tests] == ["assert xs", "assert d"] and check.in_place
    (call,) = (s for s in check.statements if s.source.startswith("candidate"))
    assert call.binds == {"xs", "d"}  # they fail where it does


@pytest.mark.parametrize(
    ("body", "tests", "in_place"),
    [
        ("ys = candidate(xs)\n    assert ys\n    assert xs", ["assert ys"], False),
        ("assert candidate(xs) is None\n    assert xs", 2, True),
        ("assert candidate(xs)\n    candidate(xs)\n    assert xs", 2, False),
        ("assert candidate([]) == None", 1, True),
        ("for xs in K:\n        candidate(xs)\n        assert xs", 1, True),
    ],
)
def test_a_result_that_a_test_reads_must_be_returned(body, tests, in_place):
    check = split_check(f"K = xs = [[1]]\ndef check(candidate):\n    {body}\n", "f")
    assert len(check.tests) == tests if isinstance(tests, int) else len(tests)
    assert check.in_place == in_place
