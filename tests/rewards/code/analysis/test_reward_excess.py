"""Texts that are short to write and endless to read or compile, in the trainer's own process."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from comlrl.rewards.code.analysis.excess import MAX_DEPTH
from comlrl.rewards.code.analysis.extraction import extract
from comlrl.rewards.code.analysis.usage import main_use
from comlrl.rewards.code.breakdown import SyntaxProblem
from comlrl.rewards.code.joint_program import compile_program, contribution, join

ROOT = Path(__file__).parents[4]


def nested_finally(depth: int) -> str:
    """Each level doubles the code of what stands below."""
    lines = ["def f(x):"]
    for level in range(1, depth + 1):
        lines += [f"{' ' * level}try: pass", f"{' ' * level}finally:"]
    return "\n".join([*lines, f"{' ' * depth} x", " return x"]) + "\n"


# MiB and seconds without the bound: more than 4096 and minutes, but for the last two
EXCESSIVE = {
    "finally": nested_finally(40),
    "returns": "def f(x):\n try:\n" + "  return x\n" * 3000 + " finally:\n" + "  x;x;x\n" * 3000,
    "strings": "def f(x):\n return " + "+".join(["'x' * 4096"] * 2000) + "\n",
    "tuples": "def f(x):\n return " + "+".join(["(1,) * 256"] * 2000) + "\n",
    "lambdas": "def f(x):\n return " + "lambda:" * 700 + "aux(x)\n",  # 700 deep: RecursionError
    "sums": "def f(x):\n return " + "x+" * 970 + "aux(x)\n",
}
READ = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
from comlrl.rewards.code.joint_program import compile_program, contribution, join
part = contribution(sys.stdin.read(), "f", ("aux", "f"))
code = compile_program(join(((), ""), [part]), part.broken) if part else None
# Not ru_maxrss, which holds that of the process that forked this one.
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(type(code).__name__, int(peak.split()[1]) >> 10)
"""


def read(text: str) -> tuple[str, int]:
    """What comes of a text in its own process, and the most memory of that in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", READ], input=text, capture_output=True, text=True, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kind, memory = done.stdout.split()
    return kind, int(memory)


@pytest.mark.parametrize("name", EXCESSIVE)
def test_what_would_never_end_to_compile_is_not_compiled(name):
    kind, memory = read(EXCESSIVE[name])
    assert kind == "SyntaxProblem" and memory < 200


@pytest.mark.parametrize(
    "text", ["@x\\\n" * 16_000, "@x(\n" * 16_000, "''' (\n" * 10_000, "def f(x\n" * 8_000]
)
def test_reading_a_text_again_and_again_has_an_end(text):
    """Each line begins a block that reaches to the end: hours, where all are read."""
    assert read(text)[1] < 200


def test_an_excessive_definition_is_there_and_its_use_is_not_read():
    part = contribution(EXCESSIVE["lambdas"], "f", ("aux", "f"))
    assert part is not None and part.defined
    assert main_use(part.nodes, "f", ["aux"]).called == ()


def test_an_excessive_definition_whose_name_python_normalizes_is_there():
    """The parser reads the fullwidth ａ as a; the rest of the text does not mention ``aux``."""
    text = "def ａux(x):\n    return [" + "1+1," * 101 + "]\n"
    part = contribution(text, "aux", ("aux", "f"))
    assert part is not None and isinstance(
        compile_program(join(((), ""), [part]), part.broken), SyntaxProblem
    )


@pytest.mark.parametrize(
    "text",
    [
        nested_finally(6),
        "def f(x):\n return " + "x + " * (MAX_DEPTH - 10) + "x\n",
        "def f(x):\n if x == 0: return 0\n"
        + "".join(f" elif x == {n}: return {n}\n" for n in range(1, 120))
        + " return x\n",
        "def f(x):\n return '-' * 80 + '\\n' + '=' * 80 + str(60 * 60 * 24 + 1)\n",
        "def f(x):\n try:\n" + "  if x: return x\n" * 30 + " finally:\n" + "  x += 1\n" * 50,
    ],
)
def test_what_a_program_could_honestly_be_is_compiled(text):
    part = contribution(text, "f", ("f",))
    assert part is not None and extract(text).functions[0].node is not None
    assert not isinstance(compile_program(join(((), ""), [part]), part.broken), SyntaxProblem)


def test_chains_of_names_are_followed_in_one_pass():
    """``a0 = aux(x); a1 = a0; …`` last to first: a pass over all of them for each would not end."""
    count = 4000
    lines = [f" a{n} = a{n - 1}" for n in range(count, 0, -1)]
    text = "\n".join(["def f(x):", " a0 = aux(x)", *lines, " return x"]) + "\n"
    part = contribution(text, "f", ("aux", "f"))
    assert part is not None
    assert main_use(part.nodes, "f", ["aux"]).ignored == ("aux",)
    part = contribution(text.replace("return x", f"return a{count}"), "f", ("aux", "f"))
    assert part is not None
    assert main_use(part.nodes, "f", ["aux"]).ignored == ()
