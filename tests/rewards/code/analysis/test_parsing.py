"""No text that a model may write takes a reader of completions down."""

from __future__ import annotations

import ast
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comlrl.loggers.views import view_of
from comlrl.rewards.code import measures
from comlrl.rewards.code.analysis.extraction import extract
from comlrl.rewards.code.analysis.parsing import MAX_BYTES, MAX_LEVELS, parse, source_of
from comlrl.rewards.code.analysis.usage import main_use
from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.conventions import convention, expected_convention
from comlrl.rewards.code.domain import CODE
from comlrl.rewards.code.joint_program import compile_program, contribution, join
from comlrl.rewards.writing.writing_domain import WRITING
from comlrl.rewards.writing.writing_reward import WritingReward
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt, JointAction, Score, Task

ENDS = ("1", "x", "aux(x)", "", "(", "'")
PIECES = (
    "-", "~", "not ", "()", ".a", "+1", "[0]", "(", "[", "{", "{1:", "lambda:", "x if x else ",
    "aux(", "*", "**", "@", ":=", "if x:\n ", "else:", "\\\n", "'", '"""',
    "f'{", "\t", "\0", "\ud800",
    "é", "9", ",", "=", "a=", "a,", "a;", "x=aux\n", "aux(x)\n", "@x\n", "class A:\n ",
    "def f():\n ",
    "async ", "await ", "yield ", "#", "```\n", "import a\n", "try:\n", "match x:\n case ",
)  # fmt: skip
HEADS = (
    "", "def aux(x):\n    return ", "def answer(x):\n    return ",
    "def answer(x):\n    y = aux(x)\n    ",
    "def answer(x):\n    return aux(x) + [aux(y) for y in x if ",
    "Sure:\n```python\ndef aux(x): return ",
    "@", "x = ", "def aux(x=", "def aux(x: ", "if True:\n    ", "class aux(",
)  # fmt: skip

NAMED = {
    "dashes": "def aux(x):\n    return " + "-" * 6000 + "x\n",
    "calls": "def aux(x):\n    return x" + "()" * 4000,
    "attributes": "def aux(x):\n    return x" + ".a" * 4000,
    "sums": "def aux(x):\n    return x" + "+1" * 4000,
    "brackets": "def aux(x):\n    return " + "(" * 190 + "x" + ",)" * 190,
    "lists": "def aux(x):\n    return " + "[" * 5000 + "x" + "]" * 5000,
    "ifs": "def aux(x):\n" + "".join(" " * n + "if x:\n" for n in range(1, 99)) + " " * 99
    + "return x",
    "elifs": "def aux(x):\n if x: return 0\n" + " elif x: return 1\n" * 3000,
    "lambdas": "def aux(x):\n    return " + "lambda: " * 3000 + "x",
    "conditions": "def aux(x):\n    return " + "x if x else " * 3000 + "x",
    "comprehensions": "def aux(x):\n    return " + "[x for x in " * 150 + "x" + "]" * 150,
    "conditions_of_loops": "def aux(x):\n    return [y for y in x if " + "-" * 3000 + "y]",
    "targets": "def aux(x):\n    return [y for " + "(" * 150 + "y" + ",)" * 150 + " in x]",
    "quotes": "def aux(x):\n    return [f'{y[\"" + "a" * 999 + "\"]}' for y in x]",
    "too_long": "def aux(x):\n    return x\n" + "#" * MAX_BYTES,
    "decorators": "@" + "-" * 6000 + "x\ndef aux(x):\n    return x",
    "default": "def aux(x=" + "x()" * 4000 + "):\n    return x",
    "constant": "K = " + "-" * 6000 + "1\ndef aux(x):\n    return x + K",
    "aliases": "def aux(x):\n" + " g=aux\n g(x)\n" * 900 + " return x",
    "branches": "def aux(x):\n" + " if x:g=aux\n" * 900 + " g(x)\n" * 900 + " return x",
    "loops": "def aux(x):\n" + " for x in x:\n  g(x)\n  g=aux\n" * 400 + " return x",
    "functions": "".join(f"def f{n}(x): return f{n + 1}(x)\n" for n in range(500))
    + "def aux(x): return f0(x)",
    "constants_and_a_use": "".join(f"K{n} = K{n + 1}\n" for n in range(900))
    + "def aux(x): return f0(K0)",
    "constants": "".join(f"K{n} = K{n + 1}\n" for n in range(900)) + "def aux(x): return K0",
}  # fmt: skip
TASK = Task(
    "t",
    {
        "prompt": "def answer(x):\n    '''Doc.'''\n",
        "test": "def check(candidate):\n    assert candidate(1)\n",
        "entry_point": "answer",
        "stages": "filter_map_reduce",
    },
)
STORY = WRITING.task("s", {"prompt": "A post."})


def assert_read_by_all(text: str) -> None:
    """Every reader of completions reads the text, as a helper's and as main's."""
    team = ("aux", "answer")
    for written in (text, text.replace("aux", "answer", 1)):
        parts = [contribution(text, "aux", team), contribution(written, "answer", team)]
        problem = compile_program(
            join(((), ""), parts), tuple(b for p in parts if p for b in p.broken), team
        )
        assert isinstance(problem, bytes) or problem.message
        for name, part in zip(team, parts, strict=True):
            if part is not None:
                assert part.function.name == name
                main_use(part.nodes, name, ["aux", "f0"], part.reads)
        convention(written)
        expected_convention(written, "answer", "filter_reduce")
        action = JointAction(TASK, (text, written))
        facts = RewardBreakdown(
            helpers=("aux",),
            defined=("aux", "answer"),
            program=join(((), ""), parts),
            syntax_error=None if isinstance(problem, bytes) else problem,
        )
        score = Score(0.0, {}, False, facts)
        measures.conventions(action)
        described = json.loads(json.dumps(dict(CODE.described(score))))
        assert facts.program.startswith(described["program"][:1000])
        prompts = Prompts(CODE)
        attempt = Attempt(TASK, (text, written), score, 1)
        for mode in CODE.modes().values():
            ((first, second),) = mode(prompts)([attempt])
            assert "aux" in first and "answer" in second
        assert "answer" in CODE.handed_on(TASK, 1, 2, (text, written))
        for name in ("code", "writing"):
            assert "<script" not in view_of(name).text(text + "<script>")
        story = WritingReward().score([JointAction(STORY, (text, written))])[0]
        assert math.isfinite(story.value)
        json.dumps(dict(WRITING.described(story)))
        assert WRITING.handed_on(STORY, 1, 2, (text, written))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.timeout(60)
def test_degenerate_texts(name):
    assert_read_by_all(NAMED[name])


@pytest.mark.slow
@given(
    st.sampled_from(HEADS),
    st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 6000)), min_size=1, max_size=4),
    st.sampled_from(ENDS),
)
@settings(max_examples=25, deadline=None)
def test_any_deep_or_long_text(head, pieces, end):
    assert_read_by_all(
        (head + "".join(piece * count for piece, count in pieces) + end)[: 2 * MAX_BYTES]
    )


def test_the_parser_is_bounded():
    assert parse("x" + "+1" * (MAX_LEVELS - 10)) is not None
    assert parse("x" + "+1" * MAX_LEVELS) is None
    assert parse("#" * MAX_BYTES) is not None and parse("#" * (MAX_BYTES + 1)) is None
    assert parse("é" * (MAX_BYTES // 2 + 1)) is None
    for text in ("x (", "a\0b", "\ud800", "-" * 6000 + "1", "(" * 3000, "9" * 5000):
        assert parse(text) is None


def test_a_number_of_too_many_digits_to_print_is_read():
    for digits in (3571, 3572, 30_000):
        (function,) = extract(f"K = 1\ndef aux(x):\n    return 0x{'f' * digits}\n").functions
        assert function.node is not None
        assert_read_by_all(f"K = 0x{'f' * digits}\ndef aux(x):\n    return K\n")


@pytest.mark.parametrize(
    "text",
    ["@\\\na\ndef f(): return 1", "@(\na)\ndef f(): return 1", "def f(): return 1 \\\n\n",
     "x = 1; y = 2",
     "if 1:\n    x = '''a\n    b'''", "if 1:\n\tdef f():\n\t\treturn '''\n\ta'''", "x = 1 # (",
     "if 1: x = 2; y = 3"],
)  # fmt: skip
def test_a_source_holds_its_statement_and_nothing_else(text):
    tree = ast.parse(text)
    statements = [inner for node in tree.body for inner in getattr(node, "body", [node])]
    statements = statements if isinstance(tree.body[0], ast.If) else tree.body
    for node in statements:
        source = source_of(node, text.split("\n"))
        assert source is not None
        (read,) = ast.parse(source).body
        assert ast.dump(read) == ast.dump(node)


def test_a_long_text_holds_nothing():
    assert extract(NAMED["too_long"]).parts == ()
    assert convention(NAMED["too_long"]) == "transform"  # its function is short
