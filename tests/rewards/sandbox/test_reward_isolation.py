"""One program, one process: nothing that one does is seen by the next, and scores repeat.

Real sandboxes, at every level that this machine has; each test has a control that would fail if its
attack could not work at all.
"""

from __future__ import annotations

import socket

import pytest

from comlrl.rewards.code.reward import CodeReward
from comlrl.rewards.sandbox.levels import LEVELS
from comlrl.types import JointAction, Task
from tests.support.fakes import code_task
from tests.support.marks import some_slow

TEST = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"
TASK = code_task("t", "", TEST, "f")
HONEST = "def f(x):\n    return x * x + {0} - {0}\n"


def breakdowns(reward: CodeReward, task: Task, *programs: str):
    scores = reward.score([JointAction(task, (program,)) for program in programs])
    return [score.facts for score in scores]


# Each changes something in its process that would fail the next program there, and answers rightly.
LASTING = {
    "builtins": "import builtins\nbuiltins.len = None",
    "modules": "import math\nmath.floor = None",
    "type_hints": "import typing as __builtins__\nfrom typing import get_type_hints",
    "recursion": "import sys\nsys.setrecursionlimit(60)",
    "tracing": "import sys\nsys.settrace(lambda *a: (_ for _ in ()).throw(KeyError))",
    "limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))",
    "memory": "import mmap\nkept = mmap.mmap(-1, 400 << 20)",
    "imports": "import sys\nsys.modules['math'] = None",
}
HEAVY = "import math\ndef f(x):\n    bytearray(200 << 20)\n"
HEAVY += "    def deep(n):\n        return n and deep(n - 1)\n"
HEAVY += "    deep(200)\n    return math.floor(x * x) + len([]) + {0} - {0}\n"


def lasting(name: str) -> str:
    lines = LASTING[name].replace("\n", "\n    ")
    return f"def f(x):\n    {lines}\n    return x * x\n"


def test_nothing_outlives_its_program(level):
    """Honest programs before and after each, in one worker; in one process they would fail."""
    texts = [t for n, name in enumerate(LASTING) for t in (HEAVY.format(n), lasting(name))]
    with CodeReward(1, 5.0, 512, level) as reward:
        found = breakdowns(reward, TASK, *texts, HEAVY.format(len(LASTING)))
        assert [b.total for b in found[::2]] == [pytest.approx(2.1)] * (len(LASTING) + 1)
        together = lasting("builtins").replace("return x * x", "return len([]) + x * x")
        assert breakdowns(reward, TASK, together)[0].tests == 0.0  # the control


RANDOM = """
def check(candidate):
    import random
    for _ in range(3):
        x = random.randrange(10 ** 9)
        assert candidate(x // 10 ** 9) == x
    assert candidate(5) == 5
"""
DRAWN = """
import random
def f(x, drawn=[]):
    if not drawn:
        {seed}
        drawn += [random.randrange(10 ** 9) for _ in range(40)][::-1]
    return 5 if x == 5 else drawn.pop()
"""


def test_no_program_draws_along_with_the_tests(level):
    seeds = ["pass", "random.seed(0)", "random.seed(None)", "random.setstate(random.getstate())"]
    seeds += [f"random.seed({n})" for n in (1, 42, "'0'")]
    programs = [DRAWN.format(seed=seed) for seed in seeds]
    with CodeReward(1, 2.0, 512, level) as reward:
        found = breakdowns(reward, code_task("t", "", RANDOM, "f"), *programs)
        assert [b.tests for b in found] == [pytest.approx(0.5)] * len(programs)
        known = RANDOM.replace("import random", "import random; random.seed(0)")
        drawing = DRAWN.format(seed="random.seed(0)")
        (control,) = breakdowns(reward, code_task("t", "", known, "f"), drawing)
        assert control.tests == 1.0


STOPPED = """
def check(candidate):
    assert all(map(candidate, [1, 2]))
    assert list(filter(candidate, [1, 2])) == []
    assert all(x for x in map(lambda x: candidate(x) == 3, [1]))
    assert sum(1 for _ in iter(lambda: candidate(1), 5)) == 0
    assert not any(map(candidate, [1]))
"""


@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration", "GeneratorExit", "Own"])
def test_what_ends_an_iteration_passes_no_test(level, error):
    program = f"def f(x):\n    class Own(StopIteration): pass\n    raise {error}(1)\n    return 1\n"
    with CodeReward(1, 2.0, 512, level) as reward:
        (found,) = breakdowns(reward, code_task("t", "", STOPPED, "f"), program)
        assert found.tests == 0.0
        assert {o.error_type for o in found.outcomes} == {"RuntimeError"}
        task = code_task("t", "", STOPPED, "f")
        (control,) = breakdowns(reward, task, "def f(x):\n    return 0\n")
        assert control.tests == pytest.approx(2 / 5)  # tests that can be passed


CHANCE = """
import gc, os, random, secrets, tempfile, uuid
def f(x):
    {extra}
    class Own: pass
    values = [hash(f), id(Own()), id([x] * 999), hash(object()), os.getpid(), os.getppid()]
    values += [random.random(), random.Random().random(), uuid.uuid4().int, secrets.token_hex()]
    values += [list({{Own, f, len, object()}})[0].__class__.__name__, gc.get_count()]
    return values
"""


@pytest.mark.parametrize("level", some_slow(LEVELS, "unshare", "limits"), indirect=True)
def test_scores_repeat_in_fresh_pools(level):
    """50 programs, whatever ran before them: what each drew, and where its objects lie."""
    programs = [CHANCE.format(extra=f"K = [{n}] * {n}") for n in range(50)]
    noise = [
        "def f(x):\n    while True: pass\n    return 1\n",
        "def f(x):\n    raise KeyError\n    return 1\n",
    ]
    noise += ["def f(x):\n    open('a', 'w').write('b')\n    return 1\n"]
    test = "def check(candidate):\n" + "".join(
        f"    assert candidate(1)[{i}] == 1\n" for i in range(12)
    )
    task, seen = code_task("t", "", test, "f"), []
    for pool in range(3):
        with CodeReward(1 + pool % 2, 1.0, 512, level) as reward:
            breakdowns(reward, TASK, *noise[:pool])
            order = programs[:: -1 if pool % 2 else 1]
            found = breakdowns(reward, task, *order)[:: -1 if pool % 2 else 1]
            seen.append([[(o.passed, o.error_type, o.actual) for o in b.outcomes] for b in found])
    assert [run == seen[0] for run in seen] == [True] * 3


# What the kernel draws, and what names this process, by every way that a program has to it.
DRAWS = """
import ctypes, importlib, os, socket
libc = ctypes.CDLL(None)
libc.getauxval.restype = ctypes.c_void_p
def device(name):
    with open(name, "rb") as file: return file.read(8)
def filled(call, *more):
    data = ctypes.create_string_buffer(8)
    return call(data, 8, *more), data.raw
def passed():
    a, b = socket.socketpair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    b.send(b"x")
    return a.recvmsg(9, 99)
def peer(option):
    return socket.socketpair()[0].getsockopt(socket.SOL_SOCKET, option, 12)
def sql():
    connection = importlib.import_module("sqlite3").connect(":memory:")
    return connection.execute("select random(), hex(randomblob(8))").fetchone()
DRAW = [
    lambda: device("/dev/urandom"), lambda: device("/dev/random"),
    lambda: os.getrandom(8), lambda: os.getrandom(8, os.GRND_NONBLOCK), lambda: os.urandom(8),
    lambda: importlib.import_module("posix").urandom(8),
    lambda: filled(libc.getrandom, 0), lambda: filled(libc.getentropy),
    lambda: filled(lambda data, size: libc.syscall(318, data, size, 0)),
    lambda: ctypes.string_at(libc.getauxval(25), 16),
    lambda: importlib.import_module("ssl").RAND_bytes(8), sql,
    lambda: importlib.import_module("_random").Random().random(),
    lambda: peer(socket.SO_PEERCRED), lambda: peer(77), passed,
    os.getresuid, os.getresgid,
]
def f(x):
    return repr(DRAW[x]())
"""
NUM_DRAWS = 18


def test_what_the_kernel_draws_repeats_or_is_refused(level):
    """Two programs of one pool and one of another; the control names what differs."""
    lines = "".join(f"    assert candidate({n}) == ''\n" for n in range(NUM_DRAWS))
    task, seen = code_task("t", "", "def check(candidate):\n" + lines, "f"), []
    for texts in ([DRAWS, DRAWS + "#"], [DRAWS]):
        with CodeReward(1, 5.0, 512, level) as reward:
            for found in breakdowns(reward, task, *texts):
                seen.append([(o.error_type, o.message, o.actual) for o in found.outcomes])
    assert len(seen[0]) == NUM_DRAWS
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][4][0] == "AssertionError"  # os.urandom: its value was read


PAIRS = """
import socket
def f(x):
    made = []
    for family in range(1, 46):
        try: socket.socketpair(family, socket.SOCK_STREAM)
        except PermissionError: continue
        except OSError as error: made.append((family, error.errno))
        else: made.append(family)
    return made
"""


def test_pairs_of_sockets_are_unix_ones_alone(level):
    test = f"def check(candidate):\n    assert candidate(0) == [{int(socket.AF_UNIX)}]\n"
    with CodeReward(1, 5.0, 512, level) as reward:
        (found,) = breakdowns(reward, code_task("t", "", test, "f"), PAIRS)
    assert found.tests == 1.0, found.outcomes


@pytest.mark.parametrize("level", some_slow(LEVELS, "unshare", "limits"), indirect=True)
def test_a_busy_neighbour_costs_nothing(level):
    """A program that would spin in seven processes and threads, beside an honest one that works."""
    spin = """
import os, threading, hashlib
def f(x):
    def spin():
        while True: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10 ** 5 + {0})
    for start in [os.fork, lambda: threading.Thread(target=spin, daemon=True).start()] * 7:
        try:
            if start() == 0: spin()
        except (OSError, RuntimeError): pass
    spin()
    return 1
"""
    work = "def f(x):\n    sum(range(3 * 10 ** 6 + {0}))\n    return x * x\n"
    texts = [text.format(n) for n in range(4) for text in (spin, work)]
    with CodeReward(2, 1.5, 512, level) as reward:
        found = breakdowns(reward, TASK, *texts)
    assert [b.total for b in found[1::2]] == [pytest.approx(2.1)] * 4
    assert [b.tests for b in found[::2]] == [0.0] * 4


def test_a_program_is_one_task(level):
    program = """
import os, subprocess, threading
def f(x):
    failed = 0
    for start in (os.fork, lambda: threading.Thread(target=print).start(),
                  lambda: subprocess.run(["/bin/true"]), lambda: os.execv("/bin/true", ["true"])):
        try: start()
        except (OSError, RuntimeError): failed += 1
    return failed if os.getpid() == 0 else -1
"""
    test = "def check(candidate):\n    assert candidate(0) == 4\n"
    with CodeReward(1, 2.0, 512, level) as reward:
        (found,) = breakdowns(reward, code_task("t", "", test, "f"), program)
    assert found.tests == 1.0, found.outcomes
