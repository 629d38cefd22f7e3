"""Every reader of a model's text is linear or bounded: four times the text takes at most 10
times as long, where a quadratic reader takes 16 times. This is the only test that measures time.
It reads the CPU time of large texts, and the least of several runs where one took too long."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

from comlrl import quoting
from comlrl.external.expert_edits import split_edits
from comlrl.loggers.views import view_of
from comlrl.rewards.code import measures
from comlrl.rewards.code.analysis.usage import main_use
from comlrl.rewards.code.breakdown import RewardBreakdown, SyntaxProblem
from comlrl.rewards.code.conventions import convention, expected_convention
from comlrl.rewards.code.domain import CODE
from comlrl.rewards.code.joint_program import compile_program, contribution, join, preamble
from comlrl.rewards.sandbox.outcome import TestOutcome
from comlrl.rewards.writing.writing_domain import WRITING
from comlrl.rewards.writing.writing_reward import WritingReward
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt, JointAction, Score, Task

SIZE = 7_000  # characters; the second text has four times as many
FACTOR, SLACK = 10.0, 0.05  # seconds of slack, for what takes next to no time
TEAM = ("aux", "f")
TASK = Task(
    "t",
    {
        "prompt": "def f(x):\n    '''Doc.'''\n",
        "test": "def check(candidate):\n    assert candidate(1)\n",
        "entry_point": "f",
        "stages": "filter_map_reduce",
    },
)
STORY = WRITING.task("s", {"prompt": "A post."})
HEAD = "def f(x):\n"


def repeated(before: str, piece: str, after: str = "") -> Callable[[int], str]:
    """A text of a piece again and again; ``{n}`` in it is its number."""

    def text(size: int) -> str:
        pieces, length, number = [], len(before), 0
        while length < size:
            pieces.append(piece.replace("{n}", str(number)))
            length, number = length + len(pieces[-1]), number + 1
        return before + "".join(pieces) + after.replace("{n}", str(number - 1))

    return text


def indented(line: str) -> Callable[[int], str]:
    def text(size: int) -> str:
        depth = int((2 * size) ** 0.5)
        return "".join(" " * n + line + "\n" for n in range(depth)) + " " * depth + "x\n"

    return text


def split(first: Callable[[int], str], second: Callable[[int], str]) -> Callable[[int], str]:
    return lambda size: first(size // 2) + second(size // 2)


SHAPES = {
    "open_brackets": split(repeated("", "a=(\n"), repeated("", "\n")),
    "open_calls": split(repeated("", "f(x\n"), repeated("", "\n")),
    "open_definitions": repeated("", "def f(x\n"),
    "decorators": repeated("", "@x(\n"),
    "continued": repeated("", "@x\\\n"),
    "triple_quotes": repeated("", "''' (\n"),
    "triple_quotes_in_code": repeated(HEAD, " x = '''\n"),
    "quotes": repeated(HEAD + " return x  # ", "\"'"),
    "backslashes": repeated("x = '", "\\", "'\n" + HEAD + " return x"),
    "backslashes_and_quotes": repeated("x = '", "\\'", "\n(\n" + HEAD + " return x"),
    "brackets": repeated("x = ", "([{"),
    "tags": repeated("", "<answer>", HEAD + " return x"),
    "tag_beginnings": repeated("", "<", "\n" + HEAD + " return x"),
    "fences": repeated("", "```python\nx\n```\n"),
    "fences_on_a_line": repeated("", "``` python ", HEAD + " return x"),
    "backticks": repeated("", "`x` "),
    "tokens": repeated("", "<s", ">" * 1000),
    "nested_tokens": lambda size: "<s" * (size // 3) + ">" * (size // 3),
    "nested_pipes": lambda size: "<|" * (size // 4) + "|>" * (size // 4),
    "inner_pipes": lambda size: "<|a" * (size // 5) + "|>" * (size // 5),
    "pipe_ends": repeated("a" * 1000, "|>"),
    "aliases": repeated(HEAD + " g=aux\n", " g{n}=g\n", " return g(x)"),
    "chained_aliases": repeated(HEAD + " g0=aux\n g0=1\n", " h=g0; g0=h\n", " return g0(x)"),
    "aliases_read_within": split(
        repeated(HEAD, " g=aux\n"), repeated(" def h():\n", "  g(x)\n", " return h()\n")
    ),
    "alias_chain": repeated(HEAD + " g0=aux\n", " g{n}=aux;g{n}(x)\n", " return x"),
    "rebound": repeated(HEAD, " if x: g=aux\n", " g(x)\n return x"),
    "loops": repeated(HEAD, " for x in x:\n  g(x)\n  g=aux\n", " return x"),
    "captures": repeated(HEAD + " match aux(x):\n  case [", "a{n},", "]: pass\n return x"),
    "cases": repeated(HEAD + " match aux(x):\n", "  case t if t: pass\n", " return x"),
    "case_mappings": repeated(HEAD + " match aux(x):\n  case {", "{n}:a{n},", "}: pass\n return x"),
    "case_alternatives": repeated(HEAD + " match x:\n  case 0", "|{n}", ": pass\n return x"),
    "keywords": repeated(HEAD + " return aux(", "a{n}=x,", ")"),
    "parameters": repeated("def f(x,", "a{n}=aux,", "):\n return x"),
    "globals": repeated(HEAD, " global t{n}\n t{n}=aux(x)\n", " return x"),
    "unpacked": repeated(HEAD + " ", "a{n},", "=aux(x),\n return x"),
    "targets": repeated(HEAD + " ", "a{n}=", "aux(x)\n return x"),
    "docstring": repeated(HEAD + ' """', "a[]:]:]:", '"""\n return aux(x)'),
    "docstring_lines": repeated(HEAD + ' """', "a[]:]:]:\n", '"""\n return aux(x)'),
    "assignments_of_tables": repeated("", "a[0]: x = 1\n", HEAD + " return x"),
    "sums": repeated(HEAD, " x=x+x\n", " return x"),
    "statements": repeated("", "x = x + aux(x)\n", HEAD + " return x"),
    "tables": repeated("", "T[{n}] = aux(T)\n", "T = 1\n" + HEAD + " return T"),
    "functions": repeated("", "def g{n}(x): return aux(x)\n", HEAD + " return g{n}(x)"),
    "function_chain": repeated("", "def g(x): return g(x)\n", HEAD + " return g(x)"),
    "repeated_definitions": repeated("", HEAD + " return x\n"),
    "repeated_broken": repeated("", HEAD + " return ((\n"),
    "classes": repeated("", "class A{n}:\n def g(s): return aux(s)\n", HEAD + " return A{n}().g()"),
    "class_names": repeated(HEAD + " class A:\n", "  __a{n}=1\n", " return x"),
    "imports": repeated("", "from aux import a{n}, aux\n", HEAD + " return aux(x)"),
    "future": repeated("", "from __future__ import annotations\n", HEAD + " return x"),
    "tries": repeated("", "try:\n import aux\nexcept: pass\n", HEAD + " return x"),
    "headers": indented("try:"),
    "headers_and_lines": split(indented("try:"), repeated("", "\n")),
    "ifs": indented("if x:"),
    "prose_headers": repeated("", "else:\n    word (\n"),
    "with_prose": repeated("", "with x:\n def g(): pass\n", HEAD + " return x"),
    "returns": repeated(HEAD, " if x: return aux(x)\n", " return x"),
    "yields": repeated(HEAD, " yield aux(x)\n"),
    "lambdas": repeated(HEAD, " (lambda: aux(x))()\n", " return x"),
    "nested_functions": repeated(HEAD, " def g{n}(): return aux(x)\n", " return g{n}()"),
    "displays": repeated(HEAD + " return [", "aux(x),", "][0]"),
    "digits": repeated("K = 0x", "f", "\n" + HEAD + " return K"),
    "numbers": repeated("K = [", "{n},", "]\n" + HEAD + " return K"),
    "f_strings": repeated(HEAD + " return f'", "{aux(x)}", "'"),
    "comments": repeated(HEAD + " return x\n", "# x = (\n"),
    "words": repeated("", "word and other words. "),
    "lines": repeated("", "word\n"),
    "spaces": repeated("", " ", "\n" + HEAD + " return x"),
    "indentation": repeated(HEAD, " " * 40 + "\n", " return x"),
    "tabs": repeated(HEAD, "\t\n", "\treturn x"),
    "forms": repeated(HEAD, "\x0c\n", " return x"),
    "marks": repeated("(", "\ufeff\n", HEAD + " return x"),
    "surrogates": repeated("", "\ud800", "\n" + HEAD + " return x"),
    "accents": repeated("", "é", "\n" + HEAD + " return x"),
    "names_with_accents": repeated(HEAD, " é{n}=aux\n", " return x"),
    "equals": repeated("", "a=", "\n" + HEAD + " return x"),
    "colons": repeated("", "a:", "\n" + HEAD + " return x"),
    "expert": repeated("", "aux *" + "*" * 50 + "\n"),
    "stars": repeated("aux", "*", "x"),
}  # fmt: skip


def reward_readers(text: str) -> dict[str, Callable[[], object]]:
    prompts = Prompts(CODE)
    parts = [contribution(text, "aux", TEAM), contribution(text, "f", TEAM)]
    broken = tuple(source for part in parts if part for source in part.broken)
    program = join(((), ""), parts)
    lines = program.count("\n")
    outcomes = (TestOutcome(text, False, "KeyError", text, line=lines, actual=text),)
    problem = SyntaxProblem(text, lines, 1, text)
    facts = [
        RewardBreakdown(helpers=("aux",), defined=TEAM, program=program, outcomes=outcomes),
        RewardBreakdown(
            helpers=("aux",), defined=TEAM, program=f"{program}(", syntax_error=problem
        ),
    ]
    attempts = [Attempt(TASK, (text, text), Score(0.0, {}, False, found), 1) for found in facts]
    modes = [mode(prompts) for mode in CODE.modes().values()]
    return {
        "contribution": lambda: [contribution(text, name, TEAM) for name in TEAM],
        "compile": lambda: compile_program(program, broken, TEAM, 1),
        "main_use": lambda: [main_use(p.nodes, "f", ["aux"], p.reads) for p in parts if p],
        "preamble": lambda: preamble(text, "f"),
        "conventions": lambda: (
            convention(text), expected_convention(text, "f", "filter_reduce"),
            measures.conventions(JointAction(TASK, (text, text))),
        ),
        "feedback": lambda: [mode([attempt]) for mode in modes for attempt in attempts],
        "described": lambda: [CODE.described(attempt.score) for attempt in attempts],
        "handed_on": lambda: CODE.handed_on(TASK, 1, 2, (text, text)),
        "clean": lambda: quoting.clean(text),
        "quoted": lambda: (quoting.fenced(text), quoting.one_line(text), quoting.printable(text)),
        "edits": lambda: split_edits(text, TEAM),
        "shown": lambda: [view_of(name).text(text) for name in ("code", "writing")],
        "writing": lambda: WritingReward().score([JointAction(STORY, (text, text))]),
        "story": lambda: WRITING.handed_on(STORY, 1, 2, (text, text)),
    }  # fmt: skip


def seconds(action: Callable[[], object], repeats: int = 1) -> float:
    times = []
    gc.disable()  # it looks at all that the tests before this one left
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    gc.enable()
    return min(times)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.timeout(120)
def test_four_times_the_text_take_four_times_as_long(shape):
    texts = [SHAPES[shape](size) for size in (SIZE, 4 * SIZE)]
    first, second = (reward_readers(text) for text in texts)
    slow = {}
    for name, action in second.items():
        for repeats in (1, 6):  # what one run shows to be linear needs no second one
            taken, allowed = seconds(action, repeats), FACTOR * seconds(first[name]) + SLACK
            if taken <= allowed:
                break
        else:
            slow[name] = (taken, allowed)
    assert slow == {}
