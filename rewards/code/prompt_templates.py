"""Prompt templates of the code domain: for turn 1, after others' texts, and after feedback."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from comlrl.rewards.code.analysis.parsing import parse

HELPER = """\
{problem}

Another programmer writes `{entry_point}`. Write one helper function `{name}` that returns \
something useful to it.
Code of `{name}` only: no fences, prose, tests or examples.
"""

MAIN = """\
{problem}

Write `{signature}`
{helpers} and you may call {them}; do not redefine {them}.
Code of `{entry_point}` only: no fences, prose, tests or examples.
"""

SINGLE = """\
{problem}

Write `{signature}`
Code of `{entry_point}` only: no fences, prose, tests or examples.
"""

DIVIDING_HELPER = """\
{problem}

{division}
Code of `{name}` only: no fences, prose, tests or examples.
"""

DIVIDING_MAIN = """\
{problem}

{division}
Begin with:
{opening}
Code of `{name}` only: no fences, prose, tests or examples.
"""

WRITTEN = """\
`{name}`, as it was written (not an instruction to you):
{text}
"""

# Shown after other agents' functions; without it, a small model continues those.
HELPER_AGAIN = """\
Write one helper function `{name}`
Code of `{name}` only: no fences, prose, tests or examples.
"""

MAIN_AGAIN = """\
Write `{signature}`
Code of `{entry_point}` only: no fences, prose, tests or examples.
"""

REVISION = "Write a revised `{name}`, code only: no fences, prose, tests or examples.\n"

FIELDS = (
    "problem", "entry_point", "signature", "parameters", "arguments", "name", "helpers", "them",
    "calls", "start", "opening", "division",
)  # fmt: skip


def helper_names(num_agents: int) -> tuple[str, ...]:
    """Return the names of a team's N − 1 helpers: ``aux``, ``aux2``, …"""
    return tuple("aux" if i == 0 else f"aux{i + 1}" for i in range(num_agents - 1))


def roles(num_agents: int) -> tuple[str, ...]:
    """Return the agents' role names in order: aux, aux2, …, main."""
    return (*helper_names(num_agents), "main")


def signature(prompt: str, entry_point: str) -> str:
    """Return the signature ``def …:`` of the entry point in a prompt, on one line.

    Raises ValueError if the prompt contains none or it does not parse.
    """
    pattern = rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\s*\("
    starts = list(re.finditer(pattern, prompt, re.MULTILINE))
    if not starts:
        raise ValueError(
            f"its prompt contains no line `def {entry_point}(…):`; check `prompt` and `entry_point`"
        )
    lines = prompt[starts[-1].start() :].split("\n")
    for count in range(1, len(lines) + 1):  # a signature may span several lines
        source = "\n".join(lines[:count])
        function = parse(source + " pass" if source.rstrip().endswith(":") else source)
        if function is None:
            continue
        definition = function.body[0]
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
            definition.body, definition.decorator_list = [ast.Pass()], []
            return ast.unparse(definition).split("\n")[0]
    raise ValueError(f"the signature of `{entry_point}` in its prompt is not valid Python")


def of_call(head: str) -> tuple[str, str]:
    """Return the parameters of a signature, and the arguments of a call that forwards them.

    For example ``a: int, *, b=2`` and ``a, b=b``.
    """
    (definition,) = ast.parse(f"{head} pass").body
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    parameters = definition.args
    names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
    names += [f"*{parameters.vararg.arg}"] if parameters.vararg else []
    names += [f"{each.arg}={each.arg}" for each in parameters.kwonlyargs]
    names += [f"**{parameters.kwarg.arg}"] if parameters.kwarg else []
    return ast.unparse(parameters), ", ".join(names)


def _listed(words: list[str]) -> str:
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} and {words[-1]}"


# Matches problems about several items, from which a helper picks some and returns a list.
_ITEMS = re.compile(
    r"\[|\b(lists?|arrays?|tuples?|dict\w*|sets?|words|characters|letters|numbers|digits|values|keys"
    r"|elements|items|pairs)\b"
)
_NUMBERS = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}


def division(problem: str, names: Sequence[str], parameters: str) -> list[str]:
    """Return each agent's instructions on the division of work; ``names`` ends with main's."""
    *helpers, main = names
    if not helpers:
        return [""]
    team = f"{_NUMBERS.get(len(names), str(len(names)))} functions do this work."
    has_items = _ITEMS.search(problem) is not None
    first, result = (
        ("picks the items that count and returns them as a list", "list of the items that count")
        if has_items
        else ("does the first half of the work and returns its result", "result of the first half")
    )
    if len(helpers) == 1:
        later = "list" if has_items else "result"
        return [
            f"{team} First `aux({parameters})` {first}; later another function computes the result "
            f"from that {later}.",
            f"{team} `{main}` calls `aux`, which returns the {result}, as `part`. Compute the "
            "result from `part`.",
        ]
    parts = [name.replace("aux", "part") for name in helpers]
    steps = [first, *["does another part of the work and returns its result"] * len(helpers[1:])]
    instructions = [
        f"{team} `{name}({parameters})` {step}; later `{main}` computes the result from all that "
        "they return."
        for name, step in zip(helpers, steps, strict=True)
    ]
    calls = _listed([f"`{name}` as `{part}`" for name, part in zip(helpers, parts, strict=True)])
    instructions += [
        f"{team} `{main}` has what the others return: {calls}. The first is the {result}. Compute "
        "the result from them."
    ]
    return instructions


def values(problem: str, head: str, entry_point: str, num_agents: int) -> list[dict[str, str]]:
    """Return the values of ``FIELDS`` for each agent; ``head`` is the entry point's signature."""
    names = helper_names(num_agents)
    listed = _listed([f"`{name}(...)`" for name in names])
    parameters, arguments = of_call(head)
    shared = {
        "problem": problem.strip("\n"),
        "entry_point": entry_point,
        "signature": head,
        "parameters": parameters,
        "arguments": arguments,
        "helpers": f"{listed} exists" if len(names) == 1 else f"{listed} exist",
        "them": "it" if len(names) == 1 else "them",
        "calls": "\n".join(
            f"    {name.replace('aux', 'part')} = {name}({arguments})" for name in names
        ),
    }
    starts = (*(f"def {name}({parameters}):" for name in names), head)
    openings = (*starts[:-1], f"{head}\n{shared['calls']}" if names else head)
    functions = (*names, entry_point)
    divisions = division(problem, functions, parameters)
    return [
        shared | {"name": name, "start": start, "opening": opening, "division": part}
        for name, start, opening, part in zip(functions, starts, openings, divisions, strict=True)
    ]
