"""An agent's whole text runs, in its order: what people write above and below their function."""

from __future__ import annotations

import pytest

from comlrl.rewards.code.reward import CodeReward
from comlrl.types import JointAction
from tests.support.fakes import code_task

TEST = """
def check(candidate):
    assert candidate(3) == 14
    assert candidate(5) == 30
    assert candidate(0) == 5
"""
TASK = code_task("t", "def f(x):\n    '''A function of x.'''\n", TEST, "f")
AUX = "def aux(v):\n    return v * v\n"

# Statements, and what main returns; y is aux(x).
PATTERNS = {
    "for": ("T = []\nfor i in range(10): T.append(i)", "y + T[5]"),
    "while": ("T = []\nwhile len(T) < 9: T.append(len(T))", "y + T[5]"),
    "if": ("T = []\nif not T: T.append(5)", "y + T[0]"),
    "with": ("import contextlib\nT = []\nwith contextlib.nullcontext(): T.append(5)", "y + T[0]"),
    "try": ("T = []\ntry: T.append(5)\nfinally: T.append(6)", "y + T[0]"),
    "build": ("T = {}\ndef build():\n    T[0] = 5\nbuild()", "y + T[0]"),
    "build_global": ("T = 0\ndef build():\n    global T\n    T = 5\nbuild()", "y + T"),
    "heapify": ("import heapq\nH = [9, 7, 5]\nheapq.heapify(H)", "y + H[0]"),
    "heappush": ("import heapq\nH = [9]\nheapq.heappush(H, 5)", "y + H[0]"),
    "insort": ("import bisect\nH = [9]\nbisect.insort(H, 5)", "y + H[0]"),
    "add_in_for": ("S = set()\nfor i in (5,): S.add(i)", "y + min(S)"),
    "setdefault": ("T = {}\nfor i in (5,):\n    T.setdefault(0, []).append(i)", "y + T[0][0]"),
    "defaultdict": ("from collections import defaultdict\nT = defaultdict(list)\n"
                    "for i in (5,): T[0].append(i)", "y + T[0][0]"),
    "comprehension": ("T = []\n[T.append(i) for i in range(9)]", "y + T[5]"),
    "nested_loops": ("T = []\nfor i in range(3):\n    for j in range(3):\n        T.append(3 * i + j)",  # noqa: E501
                     "y + T[5]"),
    "augmented": ("K = 1\nfor i in range(4): K += 1", "y + K"),
    "augmented_item": ("T = [1]\nfor i in range(4): T[0] += 1", "y + T[0]"),
    "recursion_limit": ("import sys\nsys.setrecursionlimit(5000)\n"
                        "def g(n): return 5 if n == 0 else g(n - 1)", "y + g(2000)"),
    "int_digits": ("import sys\ngetattr(sys, 'set_int_max_str_digits', id)(0)",
                   "y + 5 * (len(str(10 ** 5000)) == 5001)"),
    "seed": ("import random\nrandom.seed(7)\nA = random.random()\nrandom.seed(7)\nB = random.random()",  # noqa: E501
             "y + 5 * (A == B)"),
    "precision": ("import decimal\ndecimal.getcontext().prec = 3\nfrom decimal import Decimal",
                  "y + 5 * (str(Decimal(1) / 3) == '0.333')"),
    "singledispatch": ("import functools\n@functools.singledispatch\ndef g(v): return 0\n"
                       "@g.register(int)\ndef _(v): return 5\n@g.register(str)\ndef _(v): return 1",
                       "y + g(1)"),
    "registry": ("R = {}\ndef register(h):\n    R[h.__name__] = h\n    return h\n"
                 "@register\ndef five(): return 5", "y + R['five']()"),
    "registry_of_classes": ("R = []\ndef register(c):\n    R.append(c)\n    return c\n"
                            "@register\nclass C:\n    five = 5", "y + R[0].five"),
    "init_subclass": ("class B:\n    R = []\n    def __init_subclass__(cls): B.R.append(cls)\n"
                      "class C(B):\n    five = 5", "y + B.R[0].five"),
    "subclasses": ("class B: pass\nclass C(B):\n    five = 5", "y + B.__subclasses__()[0].five"),
    "abc_register": ("import abc\nclass B(abc.ABC): pass\nclass C: pass\nB.register(C)",
                     "y + 5 * isinstance(C(), B)"),
    "alias": ("TABLE = {}\nT = TABLE\nT['k'] = 5", "y + TABLE['k']"),
    "attribute": ("class C: pass\nC.five = 5", "y + C.five"),
    "function_attribute": ("def g(): return g.five\ng.five = 5", "y + g()"),
    "setattr": ("class C: pass\nsetattr(C, 'five', 5)", "y + C.five"),
    "globals": ("globals()['K'] = 5", "y + K"),
    "exec": ("exec('K = 5')", "y + K"),
    "del": ("K = 5\nL = K\ndel K", "y + L"),
    "import_in_try": ("try:\n    import numpy_of_none as n\nexcept ImportError:\n    n = None",
                      "y + (5 if n is None else 0)"),
    "version": ("import sys\nif sys.version_info >= (3,):\n    def g(): return 5\nelse:\n    g = None",  # noqa: E501
                "y + g()"),
    "match": ("match 5:\n    case int(): K = 5\n    case _: K = 0", "y + K"),
    "walrus": ("if (K := 5): pass", "y + K"),
    "wrapped_support": ("def twice(g): return lambda: 5\ndef g(): return 0\ng = twice(g)", "y + g()"),  # noqa: E501
    "redefined": ("def g(): return 5\nh = g\ndef g(): return h()", "y + g()"),
    "sort": ("T = [9, 5]\nT.sort()", "y + T[0]"),
    "unpacked": ("(A, B), *C = (1, 2), 5", "y + C[0]"),
    "generator": ("G = iter([5] * 9)\nnext(G)", "y + next(G)"),
    "lambda_table": ("T = {}\nfor k in (5,): T[k] = lambda k=k: k", "y + T[5]()"),
    "enum": ("import enum\nclass E(enum.Enum):\n    A = 5", "y + E.A.value"),
    "dataclass": ("import dataclasses\n@dataclasses.dataclass\nclass D:\n    five: int = 5",
                  "y + D().five"),
    "sieve": ("P = [True] * 10\nfor i in range(2, 4):\n    for j in range(i * i, 10, i):\n"
              "        P[j] = False", "y + 5 * (P[5] and not P[9])"),
    "cached": ("import functools\n@functools.lru_cache(None)\ndef g(n): return n\n"
               "for i in range(9): g(i)", "y + 5 * (g.cache_info().currsize == 9)"),
    "assert_that_fills": ("T = []\nassert T.append(5) is None", "y + T[0]"),
    "print_that_fills": ("T = []\nprint(T.append(5))", "y + T[0]"),
    "stack": ("from collections import deque\nQ = deque()\nQ.append(5)\nQ.rotate(1)", "y + Q[0]"),
    "chained": ("A = B = []\nA.append(5)", "y + B[0]"),
}  # fmt: skip
BELOW = {
    "decorated": "def deco(g): return lambda x: g(x) + 5\nf = deco(f)\n",
    "table": "T = {}\nfor i in range(9): T[i] = 5\n_f = f\ndef f(x): return _f(x) + T[x]\n",
    "wraps": "import functools\ndef deco(g):\n    @functools.wraps(g)\n    def h(x): return g(x) + 5\n"  # noqa: E501
             "    return h\nf = deco(f)\n",
}  # fmt: skip
EXAMPLES = [
    "f(1 / 0)", "print(f(1 / 0))", "assert f(3) == 0", "assert f(3) == 0, f(1 / 0)", "f()",
    "raise SystemExit", "import sys\nsys.exit(f(3))", "exit()", "quit(1)", "x = int(input())",
    "for line in open(0): print(f(int(line)))\ninput()", "result = f(1 / 0)\nprint(result)",
    "import doctest\ndoctest.testmod()", "import unittest\nunittest.main()",
    "if __name__ == '__main__':\n    while True: pass",
    "if '__main__' == __name__:\n    while True: pass",
    "print(" + "f(3), " * 20 + ")", "import pandas as pd", "from numpy import *",
    "for a, b in [(3, 0)]:\n    assert f(a) == b", "def test():\n    assert f(3) == 0\ntest()",
    "with open('/none/of/this') as file: print(file.read())", "raise KeyboardInterrupt",
    "class T(Missing): pass", "@missing\ndef g(): pass", "import os\nos.environ['NONE']",
]  # fmt: skip


def facts(reward, *texts: str):
    return reward.score([JointAction(TASK, texts)])[0].facts


def assert_right(reward, *texts: str) -> None:
    found = facts(reward, *texts)
    assert found.total == pytest.approx(4.0), (found.program, found.outcomes[:1])


@pytest.mark.parametrize("name", PATTERNS)
def test_what_stands_above_main(reward, name):
    above, value = PATTERNS[name]
    text = f"{above}\ndef f(x):\n    y = aux(x)\n    return {value}\n"
    assert_right(reward, AUX, text)
    assert_right(reward, AUX, f"Here's my answer:\n```python\n{text}```\nIsn't it (fine?")
    assert_right(reward, AUX, f"{text}\ndef unfinished(v):\n    return [")  # cut off at its limit


@pytest.mark.parametrize("name", PATTERNS)
def test_what_stands_above_aux(reward, name):
    above, value = PATTERNS[name]
    aux = f"{above}\ndef aux(x):\n    y = x * x\n    return {value}\n"
    assert_right(reward, aux, "def f(x):\n    y = aux(x)\n    return y + 0\n")


@pytest.mark.parametrize("name", BELOW)
def test_what_stands_below_main(reward, name):
    assert_right(reward, AUX, f"def f(x):\n    y = aux(x)\n    return y + 0\n\n{BELOW[name]}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_that_fails_is_passed_over(reward, example):
    main = f"def f(x):\n    y = aux(x)\n    return y + 5\n{example}\n"
    assert_right(reward, AUX, main)
    aux = f"def aux(v):\n    return v * v\n{example.replace('f(', 'aux(')}\n"
    assert_right(reward, aux, "def f(x):\n    y = aux(x)\n    return y + 5\n")


def test_all_of_a_text_has_one_budget():
    main = "def f(x):\n    y = aux(x)\n    return y + 5\nwhile True: pass\n"
    with CodeReward(workers=1, timeout=0.5) as reward:
        found = facts(reward, AUX, main)
    assert found.total == pytest.approx(0.4 + 0.6 + 0.5)
    assert all(outcome.timed_out for outcome in found.outcomes)


def test_a_definition_that_fails_is_reported(reward):
    found = facts(reward, AUX, "def f(x, y=1 / 0):\n    return aux(x)\n")
    assert [o.error_type for o in found.outcomes] == ["ZeroDivisionError"] * 3


SUPPLIED = [
    "def ａux(v): return v * v",  # Python reads the fullwidth letter as a
    "def aux(v): return v * v", "aux = lambda v: v * v", "aux: object = lambda v: v * v",
    "class aux:\n    def __new__(c, v): return v * v", "(aux := lambda v: v * v)",
    "try:\n    from aux import aux\nexcept ImportError:\n    def aux(v): return v * v",
    "try:\n    aux\nexcept NameError:\n    aux = lambda v: v * v",
    "if 'aux' not in globals():\n    def aux(v): return v * v\n    K = 1",
    "import math\nfor _ in 'a':\n    def aux(v): return v * v\n    K = 1",
    "async def aux(v): return v * v", "import aux", "from aux import aux", "from aux import *",
]  # fmt: skip


@pytest.mark.parametrize("supplied", SUPPLIED)
def test_main_supplies_no_helper(reward, supplied):
    main = f"{supplied}\ndef f(x):\n    y = aux(x)\n    return y + 5\n"
    assert facts(reward, "no code", main).total == pytest.approx(0.6 + 0.5)
    assert_right(reward, AUX, main)  # what the other agent wrote is what runs


@pytest.mark.parametrize(
    "line", ["from aux import aux as g", "import aux as g", "from aux import aux as g, more"]
)
def test_a_renamed_import_of_a_helper_is_the_helper(reward, line):
    assert_right(reward, AUX, f"{line}\ndef f(x):\n    y = g(x)\n    return y + 5\n")
    assert_right(reward, AUX, f"def f(x):\n    {line}\n    y = g(x)\n    return y + 5\n")


@pytest.mark.parametrize("supplied", [s.replace("aux", "f") for s in SUPPLIED])
def test_a_helper_supplies_no_main(reward, supplied):
    aux = f"{AUX}{supplied}\n"
    assert facts(reward, aux, "no code").total == pytest.approx(0.4)
    assert_right(reward, aux, "def f(x):\n    y = aux(x)\n    return y + 5\n")


F = "def f(x):\n    y = aux(x)\n    return y + 5"
A = "def aux(x):\n    y = x\n    return y * y"


def answers(code: str) -> dict[str, str]:
    return {
    "fence": code + "```",
    "fence_and_prose": f"```python\n{code}``` Hope this helps!",
    "fences": f"Sure:\n```python\n{code}\n```\nand\n```\nprint(f(1))```",
    "answer": f"<answer>\n{code}</answer>",
    "code": f"<code>{code}</code>",
    "end": code + "<|im_end|>",
    "end_and_more": code + "<|im_end|>\n<|im_start|>user\nThanks (",
    "eot": code + "<|eot_id|>",
    "eos": code + "</s>",
    "inst": code + "[/INST]",
    "turn": code + "<end_of_turn>",
    "tildes": code + "~~~",
    "backtick": code + "`",
    "fence_line": f"```python {code}\n```",
    "fence_line_py": f"Here:\n```py {code}\n```\nDone (",
    "fence_line_without_language": f"```{code}\n```",
    "fence_line_import": f"```python import math\n{code}\n```",
    "fence_line_indented": "1. So:\n\n  ```python " + code.replace("\n", "\n  ") + "\n  ```",
    "tag_line": f"<answer>{code}\n</answer>",
    "tags_line": f"<think></think><answer> {code}</answer>",
    "think": f"<think>\nlet's see (or not\n</think>\n{code}",
    "bom": f"Text.\n\ufeff{code}\n",
    "bom_of_the_second": f"K = 5\n\ufeff{code}\n",
    "bom_indented": "So:\n\n  \ufeff" + code.replace("\n", "\n  "),
    "carriage": code.replace("\n", "\r\n") + "```",
} | {
    f"prose_{number}": f"{prose}\n    " + code.replace("\n", "\n    ")
    for number, prose in enumerate(
        ["finally, the function:", "try this one:", "class of functions with one argument:",
         "else:", "class, as you asked:", "for example:", "with this in mind:", "if you like it:",
         "while we are at it:", "except for zero:", "elif is not needed:", "def is the keyword:",
         "async is not needed:", "try:", "finally:", "except:", "else, use this:",
         "class based solution, no:", "match your example:", "and so on (see below:"],
    )
}  # fmt: skip


@pytest.mark.parametrize("name", answers(F))
def test_answers_that_are_read(reward, name):
    assert_right(reward, AUX, answers(F)[name])
    assert_right(reward, answers(A)[name], F)


def test_answers_on_one_line(reward):
    for text in ("<answer>def f(x): return aux(x) + 5</answer>", "```python def f(x): return aux(x) + 5```",  # noqa: E501
                 "<code>def f(x): return aux(x) + 5</code> (that's all", "def f(x): return aux(x) + 5<|im_end|>",  # noqa: E501
                 "<|im_start|>def f(x): return aux(x) + 5<|im_end|>"):  # fmt: skip
        assert facts(reward, AUX, text).total == pytest.approx(3.0), text


def test_strings_keep_what_looks_like_a_fence_or_a_tag(reward):
    body = "    s = '</answer>```<|im_end|>'\n    y = aux(x)\n    return y + 5 * (len(s) == 22)"
    assert_right(
        reward, AUX, f"def f(x):\n    '''Like\n```python\nf(1)</answer>\n```\n    '''\n{body}```"
    )
