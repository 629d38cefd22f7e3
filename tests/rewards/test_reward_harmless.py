"""Programs that may follow each other in one process, and those that may not."""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import importlib
import math
import random
import re
import string
import sys
import time
import types
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comlrl.types import JointAction, Task
from rewards import harmless
from rewards.analysis import contribution, is_harmless_text, join
from rewards.code_rewards import CodeReward
from rewards.sandbox import wire
from rewards.sandbox.candidate import answer
from rewards.sandbox.confine import FIRST_UID
from tests.rewards.test_reward_adversaries import PROGRAMS

HARMLESS = {
    "plain": "def f(xs):\n    return [x ** 2 for x in sorted(xs, reverse=True) if x % 2]",
    "imports": "import math, re\nfrom typing import List as L\nfrom collections import Counter\n"
    "def f(text: L[str]) -> float:\n"
    "    return math.sqrt(Counter(re.findall('a', text)).most_common(1)[0][1])",
    "recursion": "from functools import lru_cache\n@lru_cache(None)\n"
    "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)",
    "errors": "def f(x):\n    try:\n        return 1 / x\n"
    "    except ZeroDivisionError as error:\n        raise ValueError(error.args) from None\n"
    "    finally:\n        print('done')",
    "generator": "def f(xs):\n    yield from (x for x in xs)\n    yield 1",
    "nested": "def f(xs):\n    total = 0\n"
    "    def add(x):\n        nonlocal total\n        total += x\n"
    "    for x in xs: add(x)\n    return f'{total:>3}'",
    "own_names": "memo = {}\ndef f(x):\n    global memo\n    memo[x] = memo.get(x, 0) + 1\n"
    "    del memo[x]\n    return (lambda y, *z, **w: y)(x)",
}

# Each reaches, or could reach, something that outlives its own names.
NOT_HARMLESS = {
    "class": "class A:\n    def __del__(self):\n        while True: pass",
    "metaclass": "def f(x):\n    return type('A', (), {})",
    "set_attribute": "import math\nmath.pi = 3",
    "set_by_loop": "import math\nfor math.pi in [3]: pass",
    "set_by_unpacking": "import math\n(a, *math.pi) = 1, 2",
    "set_by_walrus_target": "import math\n[0 for math.pi in [3]]",
    "add_to_attribute": "import math\nmath.pi += 1",
    "delete_attribute": "import math\ndel math.pi",
    "annotate_attribute": "import math\nmath.pi: int = 3",
    "setattr": "def f(x):\n    setattr(f, 'a', 1)",
    "getattr": "def f(x):\n    return getattr(x, 'a')",
    "own_getattr": "def getattr(x): return x\ndef f(x):\n    return getattr(x)",
    "builtins_name": "def f(x):\n    return __builtins__",
    "import_function": "def f(x):\n    return __import__('os')",
    "dunder": "def f(x):\n    return ().__class__",
    "private": "import re\ndef f(x):\n    return re._cache",
    "frame": "def f(g):\n    return g.gi_frame",
    "code": "def f(x):\n    return f.func_code",
    "module_of_module": "import re\ndef f(x):\n    return re.enum",
    "format": "def f(x):\n    return '{0.__class__}'.format(x)",
    "format_map": "def f(x):\n    return '{a}'.format_map(x)",
    "formatter": "from string import Formatter",
    "attrgetter": "from operator import attrgetter",
    "type_hints": "import typing\ndef f(x):\n    return typing.get_type_hints(x)",
    "namedtuple": "from collections import namedtuple",
    "wraps": "import functools, math\nfunctools.wraps(len)(math)",
    "eval": "def f(x):\n    return eval('1')",
    "open": "def f(x):\n    return open('x')",
    "globals": "def f(x):\n    globals()['y'] = 1",
    "input": "def f(x):\n    return input()",
    "exit": "def f(x):\n    raise SystemExit",
    "catches_all": "def f(x):\n    try:\n        return x\n    except BaseException: pass",
    "sys": "import sys\nsys.setrecursionlimit(10)",
    "random": "import random\nrandom.seed(1)",
    "decimal": "from decimal import getcontext",
    "submodule": "import collections.abc",
    "star": "from math import *",
    "relative": "from . import math",
    "with": "def f(x):\n    with x: pass",
    "match": "def f(x):\n    match x:\n        case int(__class__=c): return c",
    "async": "async def f(x):\n    return 1",
    "suspended_cleanup": "def f(x):\n    try:\n        yield 1\n    finally:\n"
    "        while True: pass",
    "suspended_handler": "def f(x):\n    while True:\n        try: yield 1\n        except: pass",
    "delegated_cleanup": "def f(x):\n    try: yield from x\n    finally: print(1)",
    "exception_group": "def f(x):\n    try: pass\n    except* ValueError: pass",
    "unparsable": "def f(x:\n    return 1",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless(name):
    assert is_harmless_text(HARMLESS[name])


@pytest.mark.parametrize("name", NOT_HARMLESS)
def test_not_harmless(name):
    assert not is_harmless_text(NOT_HARMLESS[name])
    assert not is_harmless_text(HARMLESS["plain"] + "\n" + NOT_HARMLESS[name])


def test_adversaries_that_touch_anything_are_not_harmless():
    """What is left can only fail, loop, or fill its own process's memory."""
    left = {name for name, program in PROGRAMS.items() if is_harmless_text(program)}
    assert left <= {
        *("not_implemented", "raises_stop_iteration", "raises_assertion_error", "endless_loop"),
        *("endless_loop_at_import", "endless_generator", "endless_power", "endless_recursion"),
        *("memory_bomb", "string_bomb", "huge_result", "huge_integer", "cyclic_result"),
        *("deep_result", "colliding_set"),
    }


LINES = st.sampled_from(
    [
        *(
            "def f(x):",
            "    return x",
            "    x = '''",
            "'''",
            "    return x; import os",
            "    x = (",
            ")",
        ),
        *(
            "import math",
            "import os",
            "x = 1; import os",
            "@f",
            "def aux(x): return x; y = 1",
            "\\",
        ),
        *(
            "    class A: pass",
            "    return '\\",
            "",
            "# def",
            "\x0c",
            "    if x:",
            "        import os",
        ),
    ]
)


@pytest.mark.parametrize("name", harmless._MEMBERS)
def test_allowed_attributes_lead_from_no_module_to_another(name):
    """A list is read from every module: none of it is a module, or a function not listed there."""
    module = importlib.import_module(name)
    unlisted = harmless._ATTRIBUTES & set(dir(module)) - harmless._MEMBERS[name]
    found = [getattr(module, attribute) for attribute in unlisted]
    assert not any(isinstance(f, types.ModuleType | types.FunctionType) for f in found)


@given(st.lists(LINES, max_size=12).map("\n".join), st.lists(LINES, max_size=12).map("\n".join))
def test_what_runs_is_what_was_looked_at(aux, main):
    """The joint program of harmless contributions is harmless as a whole."""
    parts = [contribution(aux, "aux", ("aux", "f")), contribution(main, "f", ("aux", "f"))]
    if all(part is None or part.harmless for part in parts):
        program = join((("import math",), ""), parts)
        try:
            ast.parse(program)
        except SyntaxError:
            return
        assert is_harmless_text(program)


def test_harmless_programs_leave_the_interpreter_as_it_was():
    """Names of builtins, types and modules before and after, and what is global to a process."""
    before = _state()
    arguments = wire.call([[3, 1, 2]], {})
    for source in HARMLESS.values():
        module = types.ModuleType("program")
        exec(source, module.__dict__)
        answer(module.f, arguments)
    assert _state() == before


def _state() -> object:
    holders = [builtins, collections, functools, math, re, string, typing, collections.Counter]
    names = {str(h): {k: id(v) for k, v in vars(h).items() if k != "_"} for h in holders}
    rest = (sys.getrecursionlimit(), random.getstate(), sys.gettrace(), sys.excepthook)
    return names, rest, len(sys.path)


# --- real processes ----------------------------------------------------------------------------

TASK = Task("t", "", "def check(candidate):\n    assert candidate(2) == 4\n", "f")


def square(number: int) -> str:
    return f"def f(x):\n    return x * x + {number} - {number}\n"


def score(reward: CodeReward, *programs: str) -> list[float]:
    return [score.value for score in reward.score([JointAction(TASK, (p,)) for p in programs])]


def processes(reward: CodeReward) -> set[int]:
    """Of the first worker's sandbox."""
    user = FIRST_UID + reward._pool._workers[0].process.pid
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            status = (entry / "status").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if (
            status
            and int(status.split("Uid:")[1].split()[0]) == user
            and "\nState:\tZ" not in status
        ):
            found.add(int(entry.name))
    return found


@pytest.fixture
def reward():
    with CodeReward(workers=1, timeout=1.0, memory_mb=256) as reward:
        score(reward, square(1000))
        if not processes(reward):
            pytest.skip("the sandbox has no user of its own here, to know its processes by")
        yield reward


def test_harmless_programs_follow_each_other_in_one_process(reward):
    first = processes(reward)
    assert len(first) == 2  # the one that forks, and the one that waits for the next program
    assert score(reward, *map(square, range(20))) == [pytest.approx(2.1)] * 20
    assert processes(reward) == first


def test_other_programs_have_a_process_of_their_own(reward):
    first = processes(reward)
    other = "import sys\ndef f(x):\n    return x * x if sys else 0\n"
    assert score(reward, other) == [pytest.approx(2.1)]
    while not processes(reward) < first:  # a score is told before its process has ended
        time.sleep(0.01)
    assert len(processes(reward)) == 1


def test_a_process_that_has_grown_takes_no_further_program(reward):
    first = processes(reward)
    grown = "def f(x):\n    return x * len([0] * (8 << 20)) // (4 << 20)\n"  # 64 MiB
    assert score(reward, grown) == [pytest.approx(2.1)]
    assert processes(reward) == first
    assert score(reward, square(1)) == [pytest.approx(2.1)]
    assert len(processes(reward)) == 2 and processes(reward) != first


def test_names_do_not_stay(reward):
    leaves = "import math\nseen = [1]\ndef helper(x): return x\n" + square(1)
    asks = "def f(x):\n    return x * x + len(seen)\n"
    helper = "def f(x):\n    return helper(x) * x\n"
    module = "def f(x):\n    return x * x * math.floor(1)\n"
    assert score(reward, leaves, asks, helper, module) == [
        pytest.approx(v) for v in (2.1, *[1.1] * 3)
    ]


@pytest.mark.parametrize(
    "ends",
    [
        "def f(x):\n    while True: pass\n    return 1\n",  # timed out
        "def f(x):\n    return f(x)\n",
        "def f(x):\n    return [0] * 10 ** 12\n",
        "def f(x, y=1 / 0):\n    return 1\n",  # does not load
        "def f():\n    return 1\n",
    ],
)
def test_after_a_failure_the_next_is_scored_exactly(reward, ends):
    assert score(reward, ends, *map(square, range(3))) == [
        pytest.approx(v) for v in (1.1, *[2.1] * 3)
    ]
