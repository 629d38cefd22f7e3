"""Rows as people have them: columns that are missing, MBPP's form, tests that no program passes."""

from __future__ import annotations

import pytest

from comlrl.rewards.code.domain import CODE
from comlrl.rewards.code.reward import CodeReward
from comlrl.types import JointAction

PROMPT = "def f(xs):\n    '''Sorts.'''\n"
TEST = "def check(candidate):\n    assert candidate([2, 1]) == [1, 2]\n"
ROW = {"prompt": PROMPT, "test": TEST, "entry_point": "f"}
LONG = "0x" + "f" * 4000


def scores(rows: list[dict]) -> list:
    tasks = [CODE.task(str(number), row) for number, row in enumerate(rows)]
    solved = [CODE.reference(task, 2) for task in tasks]
    assert None not in solved
    with CodeReward(1, 10.0) as reward:
        return reward.score([JointAction(*pair) for pair in zip(tasks, solved, strict=True)])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"test": f"import pandas as pd\n{TEST}"}, "pandas"),
        ({"test": f"from pandas.x import y\n{TEST}"}, "pandas"),
        ({"test": TEST + "    import pandas\n"}, "pandas"),
        ({"test": "from . import helper\n" + TEST}, "imports"),
        ({"test": "from solution import f\n" + TEST}, "solution"),
        ({"prompt": f"import numpy as np\n{PROMPT}"}, "numpy"),
        ({"prompt": f"from scipy.stats import norm\n{PROMPT}"}, "scipy"),
        ({"prompt": f"import ssl\n{PROMPT}"}, "ssl"),
        ({"prompt": f"async {PROMPT}"}, "async def f"),
        ({"prompt": PROMPT.replace("f(", "aux("), "entry_point": "aux"}, "aux"),
        ({"prompt": PROMPT.replace("f(", "aux2("), "entry_point": "aux2"}, "aux2"),
        ({"prompt": PROMPT.replace("xs", f"xs={LONG}")}, "prompt"),
        ({"prompt": f"K = [{LONG}]\n{PROMPT}"}, "prompt"),
        ({"test": TEST.replace("[2, 1]", LONG)}, "test"),
        ({"test": f"K = {LONG}\n"}, "test"),
        ({"test": TEST.replace("assert", "print(9) if")[:-10]}, "test"),
        ({"test": "def check(candidate):\n    print(candidate(1))\n    x = 5\n"}, "print(cand"),
        ({"test": "class TestCases(unittest.TestCase):\n    pass\n"}, "TestCases"),
        ({"test": None, "question": "?"}, "question"),
        ({"test": "", "test_list": []}, "test_list"),
        ({"test": None, "test_list": ["assert f(1) =="]}, "test_list"),
        ({"test": None, "test_list": ["assert f(1) == 2"], "code": "def g(): pass"}, "test_list"),
        ({"test": None, "test_list": ["assert f(1) == 2"], "prompt": None}, "text"),
    ],
)  # fmt: skip
def test_what_no_program_can_pass_is_refused_with_what_the_row_holds(changed, named):
    with pytest.raises(ValueError) as caught:
        CODE.task("r", {**ROW, **changed})
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "test",
    [
        f"try:\n    import pandas\nexcept ImportError:\n    pandas = None\n{TEST}",
        f"import math, numpy\nimport numpy.testing as t\n{TEST}",
    ],
)
def test_what_tests_can_do_without_or_have_is_no_reason_to_refuse(test):
    CODE.task("r", {**ROW, "test": test})


MBPP = {
    "task_id": 602,
    "text": "Find the first repeated character; '''quoted''', a \\ too.",
    "code": "def first(s):\r\n  for i, c in enumerate(s):\r\n"
    "    if c in s[:i]:\r\n      return c\r\n",
    "test_list": ['assert first("abcabc") == "a"', 'assert first("a\\n\\\\b\\n") == "\\n"'],
    "test_setup_code": "",
    "challenge_test_list": [],
}
SANITIZED = {
    "task_id": 2,
    "prompt": "Write a function to find the shared elements.",
    "code": "import math\ndef helper(a): return set(a)\n"
    "def shared(a, b=(1,)):\n  return tuple(helper(a) & set(b))",
    "test_imports": ["import math"],
    "test_list": ["assert set(shared((3, 4), (5, 4))) == set((4,))",
                  "assert math.isclose(len(shared((1, 2))), 1)"],
}  # fmt: skip
PLUS = {  # HumanEval+
    "prompt": "def g(n):\n    '''Yields n numbers.'''\n",
    "entry_point": "g",
    "test": """
import numpy as np
def is_floats(x): return isinstance(x, np.ndarray) or (x and isinstance(x[0], float))
def assertion(out, exp, atol):
    if is_floats(exp): np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)
    else: assert out == exp
def check(candidate):
    assertion(list(candidate(3)), [0.0, 1.0, 2.0], 1e-6)
    for inp, exp in zip([[1], [2]], [[0.0], [0.0, 1.0]]):
        assertion(list(candidate(*inp)), exp, 0)
    assert np.allclose(list(candidate(np.float64(2).__int__())), np.arange(2))
""",
    "canonical_solution": "    for i in range(n):\n        yield float(i)\n",
}
IN_PLACE = {
    "prompt": PROMPT,
    "entry_point": "f",
    "test": "def check(candidate):\n    xs = [2, 1]\n    candidate(xs)\n    assert xs == [1, 2]\n"
    "    ys = [1]\n    assert candidate(ys) is None\n    assert ys == [1]\n",
    "canonical_solution": "    xs.sort()\n",
}


def test_forms_that_are_read_are_won_by_their_own_solutions():
    found = scores([MBPP, SANITIZED, PLUS, IN_PLACE])
    assert [len(score.facts.outcomes) for score in found] == [2, 2, 3, 3]
    assert [score.passed for score in found] == [True] * 4
    assert CODE.task("r", SANITIZED).fields["prompt"].startswith("def shared(a, b=(1,)):")


def test_a_function_that_changes_its_arguments_fails_as_it_should():
    """What it raised fails the test after it too, though the argument is as the test wants it."""
    raising = {**IN_PLACE, "canonical_solution": "    xs.append\n    raise KeyError\n"}
    lazy = {**IN_PLACE, "canonical_solution": "    xs.copy()\n"}
    (first, second) = scores([raising, lazy])
    assert [o.passed for o in first.facts.outcomes] == [False, False, True]
    assert [o.passed for o in second.facts.outcomes] == [False, True, True]
    (other,) = scores([{**ROW, "canonical_solution": "    xs.sort()\n"}])
    assert other.facts.main_defined == 0.0  # this row's tests read the result


def test_a_row_without_a_solution_has_none():
    assert CODE.reference(CODE.task("r", ROW), 2) is None
    whole = {**ROW, "canonical_solution": PROMPT + "    return sorted(xs)\n"}
    assert CODE.reference(CODE.task("r", whole), 3) == ("", "", whole["canonical_solution"])
