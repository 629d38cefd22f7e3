"""What is found in a text: by example, and for any text around a function."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comlrl.rewards.code.analysis.extraction import extract
from comlrl.rewards.code.analysis.usage import main_use
from comlrl.rewards.code.breakdown import SyntaxProblem
from comlrl.rewards.code.joint_program import compile_program, contribution, join, preamble

FUNCTIONS = {
    "plain": "def aux(x):\n    return x + 1",
    "docstring_with_code": (
        'def aux(x):\n    """Like this:\n\ndef aux(x):\n    return None\n\n'
        '```python\naux(1)\n```\n    """\n    return x + 1'
    ),
    "comments": "def aux(x):\n\n# at the margin\n    y = x\n\n\n    # (\n    return y + 1",
    "nested": "def aux(x):\n    def inner(y):\n        return y\n    return inner(x) + 1",
    "decorated": "@staticmethod\n@print(\n    'a'\n)\ndef aux(x):\n    return x + 1",
    "long_signature": "def aux(\n    x: int,\n    y='def aux(x): (',\n) -> int:\n    return x + 1",
    "brackets": "def aux(x):\n    y = [\n1,\n2,\n]\n    return (\ny[0]\n)",
    "strings": "def aux(x):\n    y = '#' + \"'''\" + '\"\"\"' + 'it\\'s'\n    return y + \"(\"",
    "continued": "def aux(x):\n    y = 1 + \\\n2\n    return y",
    "one_line": "def aux(x): return x + 1",
    "tabs": "def aux(x):\n\tif x:\n\t\treturn x\n\treturn 1",
    "async": "async def aux(x):\n    return x + 1",
}


def found(text: str, name: str = "aux") -> str | None:
    """The syntax tree of the function found, as text."""
    function = extract(text).by_name().get(name)
    if function is None or function.node is None:
        return None
    assert function.returns
    return ast.dump(function.node)


@pytest.mark.parametrize("source", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "```python\n{}\n```",
        "Sure, here's it:\n```\n{}\n```\nThat's all (I don't know more.",
        "It's simple. Don't use `def aux(`!\n\n{}\n\nThis returns x's successor.",
        "def other(:\n    return\n\n{}\n\ndef cut_off(x):\n    return ((",
        "import math\n{}\nprint(aux(1)",
        "~~~py\n{}\n~~~\n```python\ndef aux(x):\n    return x.",
        "class Broken(\n{}\n",
        "\ufeff{}\r\n\r\nprose here",
        "# Title\n\n{}\n\n# Explanation\n\n1. First, it adds.\n2. Then it's done.",
    ],
)
def test_surroundings_change_nothing(source, around):
    assert found(around.format(source)) == ast.dump(ast.parse(source).body[0])


@pytest.mark.parametrize("source", FUNCTIONS.values(), ids=FUNCTIONS)
def test_an_indented_fence_is_dedented(source):
    if "\n\n" in source or "\n1" in source or "\n2" in source or "\ny" in source:
        pytest.skip("a line at the margin ends an indented fence")
    text = (
        "1. The helper:\n\n" + "\n".join("   " + line for line in source.split("\n")) + "\n\nEnd!"
    )
    assert found(text) == ast.dump(ast.parse(source).body[0])


# Prose without code: no line that starts like a statement which could define or hide something.
PROSE = st.text(
    st.characters(codec="utf-8", exclude_characters="\"'\\`~@", exclude_categories=("Cs",)),
    max_size=60,
).filter(lambda t: not any(w in t for w in ("def", "class", "import", "from")))


@given(before=PROSE, after=PROSE, source=st.sampled_from(sorted(FUNCTIONS.values())))
@settings(max_examples=300, deadline=None)
def test_any_prose_around(before, after, source):
    text = f"{before}\n# code:\n{source}\nOkay then: {after}"
    assert found(text) == ast.dump(ast.parse(source).body[0])
    fenced = f"{before}\n```python\n{source}\n```\n{after}"
    assert found(fenced) == ast.dump(ast.parse(source).body[0])


@given(
    source=st.sampled_from(sorted(FUNCTIONS.values())),
    following=st.sampled_from(sorted(FUNCTIONS.values())),
    cut=st.integers(0, 200),
)
@settings(max_examples=300, deadline=None)
def test_truncation_after_a_function(source, following, cut):
    """Whatever is left of a second function, cut off anywhere, the first is found as it was."""
    second = following.replace("aux", "other")[:cut]
    assert found(f"{source}\n\n\n{second}") == ast.dump(ast.parse(source).body[0])


FRAGMENTS = [
    "def aux(x):",
    "    return x",
    "return ((",
    '"""',
    "'''",
    "```",
    "@x",
    "import",
    "from",
]
FRAGMENTS += ["from a import (", "\\", "\0", "\ud800", "class A:", "  def f(x):", "\t", "#", "("]
FRAGMENTS += ["if x:", "else", "elif y:", "async def f(", "f'{", "lambda:", "\x0c", "\r", "x = ("]
ANY_TEXT = st.one_of(
    st.text(st.characters(), max_size=300),  # lone surrogates and NUL included
    st.lists(
        st.sampled_from(FRAGMENTS),
        max_size=25,
    ).map("\n".join),
)


@given(ANY_TEXT, ANY_TEXT)
@settings(max_examples=500, deadline=None)
def test_nothing_raises(first, second):
    team = ("aux", "f")
    parts = [contribution(first, "aux", team), contribution(second, "f", team)]
    for part in parts:
        if part is not None:
            main_use(part.nodes, "f", ["aux"])
    compile_program(join(preamble(first, "f"), parts), names=team)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "def aux(x):\n    return " + "(" * 5_000 + "1" + ")" * 5_000,
        "def aux(x):\n    return " + "-" * 50_000 + "1",
        "def aux(x):\n    return " + "not " * 20_000 + "1",
        "def aux(x):\n    return x" + ".a" * 50_000,
        "def aux(x):\n    return " + "1 + " * 50_000 + "1",
        "def aux(x):\n    return " + "lambda: " * 10_000 + "1",
        "def aux(x):\n    return " + "9" * 100_000,
        "\n".join("  " * depth + "if x:" for depth in range(500)),
        "a\0b\ndef aux(x):\n    return 1\n",
        "\ud800 def aux(x):\n    return '\udfff'",
        "prose and more prose. " * 100_000,
        "def aux(x):\n" * 20_000,
        "    def aux(x):\n" * 20_000,
        "@aux\n" * 50_000,
        "from a import (\n" * 50_000,
        "x = '''\n" * 50_001,
        "def aux(x): '''\n" * 20_001,
        "if x:\n  '''\n" * 20_000,
        'don\'t """ (\n' * 20_000,
    ],
    ids=range(20),
)
@pytest.mark.timeout(60)  # a quadratic reading takes minutes
def test_hostile_texts_are_read(text):
    part = contribution(text, "aux", ("aux", "f"))
    code = compile_program(join(((), ""), [part]))
    # Whatever it is, it is either code or a syntax problem that has a message.
    assert isinstance(code, bytes) or (isinstance(code, SyntaxProblem) and code.message)


def returns(text: str) -> bool:
    part = contribution(text, "aux", ("aux", "f"))
    return part is not None and part.defined


def test_level_one_is_judged_on_the_text():
    assert returns("def aux(x):\n    return ((")
    assert returns("Here:\n```python\ndef aux(x):\n    y = [1,\n    return y\n```")
    assert returns("def aux(x)\n    return 1")  # no colon
    assert not returns("def aux(x):\n    return")
    assert not returns("def aux(x):\n    # return x (\n    print((")
    assert not returns("def aux(x):\n    '''return x'''\n    print((")
    assert not returns("def aux(x):\n    print(x)")
    assert not returns("def auxiliary(x):\n    return x")
    assert not returns("class A:\n    def aux(self):\n        return 1\nprint((")
    assert not returns("x = '''\ndef aux(x):\n    return x\n'''\nprint((")


def test_of_several_definitions_the_last_finished_one_counts():
    first, second = "def aux(x):\n    return 1\n", "def aux(x):\n    return 2\n"
    assert "return 2" in extract(first + second).by_name()["aux"].source
    assert "return 2" in extract(f"{first}prose!\n{second}").by_name()["aux"].source
    assert "return 1" in extract(f"{first}\ndef aux(x):\n    return (").by_name()["aux"].source
    assert (
        "return 1" in extract(f"{first}\ndef aux(x):\n    pass\nmore prose").by_name()["aux"].source
    )


def test_all_statements_come_along_in_their_order():
    text = "import os\nfrom math import floor\ndef a(x):\n    return b(x)\n"
    text += "def b(x):\n    return floor(x)\nprint(1 / 0)\n"
    text += (
        "def c(x):\n    return x\ndef f(x):\n    return 1\ndef aux(x):\n    return a(x) + f(x)\n"
    )
    part = contribution(text, "aux", ("aux", "f"))
    assert [line for line in part.source.split("\n") if line[:1] not in ("", " ")] == [
        "import os",
        "from math import floor",
        "def a(x):",
        "def b(x):",
        "print(1 / 0)",
        "def c(x):",
        "def aux(x):",
    ]  # not f, which another agent writes


@pytest.mark.parametrize(
    "text",
    [
        "def aux(x): return 1\n\x0cprint('ran')\nprose here (",
        "def aux(x): return 1\n\x0cimport os; os.x()\nprose (",
        "def aux(x):\n    return 1\n\x0c\x0craise KeyError\n\nprose (",
        "x = 'a\\\ndef aux(x): return 1'\ndef aux(x):\n    return 1\nprint('ran')\n",
        "def aux(x):\n    return 'a\\\nb'\nprint('ran')\n(",
        "print('ran')\n\\\ndef aux(x):\n    return 1\nprint('ran')",
    ],
    ids=range(6),
)  # fmt: skip
def test_each_source_is_one_statement(text):
    """By Python's own reading, whatever looks like a line of it."""
    (function,) = extract(text).functions
    assert [type(node) for node in ast.parse(function.source).body] == [ast.FunctionDef]
    for part in extract(text).parts:
        assert len(ast.parse(part.source).body) == 1


def test_what_is_not_complete_cannot_take_in_the_next_part():
    """An open string of one agent's closes in the other's docstring: the whole would compile."""
    first = contribution("def aux(x):\n    return '''", "aux", ("aux", "f"))
    second = contribution("def f(x):\n    return 1 #'''\n", "f", ("aux", "f"))
    program = join(((), ""), [first, second])
    assert isinstance(compile_program(program), bytes)
    assert isinstance(compile_program(program, first.broken), SyntaxProblem)


def test_a_text_beyond_64_kib_holds_nothing():
    line = "def aux(x):\n    return 1\n"
    assert returns(line + "#" * (65536 - len(line)))
    assert not returns(line + "#" * (65537 - len(line)))
    assert not returns(line + "é" * 32768)  # two bytes each
    assert not returns("def aux(x):\n    return " + "-" * 660_000 + "1")


def test_preamble_leaves_the_stub_out():
    prompt = (
        "import math\nfrom typing import List\n\ndef helper(x):\n    '''Doc.'''\n    return x\n\n"
    )
    prompt += "LIMIT = 3\n\ndef f(x: List):\n    '''Doc.'''\n"
    imports, functions = preamble(prompt, "f")
    assert imports == ("import math", "from typing import List")
    assert "def helper" in functions and "LIMIT = 3" in functions and "def f" not in functions
    # a prompt that ends with the signature does not parse, and gives the same functions
    imports, functions = preamble(prompt.replace("    '''Doc.'''\n", ""), "f")
    assert imports == ("import math", "from typing import List") and "def helper" in functions


def test_strings_are_taken_to_the_letter():
    """Blanks at the end of a docstring's line survive, whether the text parses or not."""
    source = 'def aux(x):\n    """A   \n   \n  b"""\n    return aux.__doc__'
    for text in (source, f"Here's the code:\n{source}\nThat's it (done"):
        assert extract(text).by_name()["aux"].source == source


def test_what_python_warns_of_in_programs_is_not_printed():
    program = "x = 'a'(1) if 0 else 2"  # SyntaxWarning: 'str' object is not callable
    ours = f"from comlrl.rewards.code.joint_program import compile_program as c; c({program!r})"
    plain = f"compile({program!r}, 'p', 'exec')"
    assert "SyntaxWarning" in _stderr(plain)
    assert _stderr(ours) == ""


def _stderr(code: str) -> str:
    root = Path(__file__).parents[4]
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stderr
