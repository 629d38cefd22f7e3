"""What each agent contributes to the joint program.

Everything here is read from the text; nothing is run.
"""

from __future__ import annotations

import ast
import marshal
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rewards.code.bounds import check_names
from rewards.code.breakdown import SyntaxProblem
from rewards.code.extraction import UNPARSABLE, Function, Import, extract, parse
from rewards.code.usage import without_docstring

PROGRAM_NAME = "<program>"  # the file name of the joint program, in tracebacks
warnings.filterwarnings("ignore", module=re.escape(PROGRAM_NAME))  # of model-written code


@dataclass(frozen=True, slots=True)
class Contribution:
    """One agent's own definition, with the imports and functions of its text that it needs."""

    function: Function
    imports: tuple[str, ...]
    source: str  # what it needs, then its own definition
    broken: tuple[str, ...] = ()  # sources in it that do not parse, or are excessive
    support: tuple[Function, ...] = ()  # the functions that it needs

    @property
    def defined(self) -> bool:
        return self.function.returns


def contribution(text: str, name: str, team: Sequence[str]) -> Contribution | None:
    """What a text adds to the program as the definition of ``name``; None where it has none.

    ``team`` holds every name that some agent is to define; the others' names are never taken
    from this text.
    """
    extracted = extract(text)
    available = extracted.by_name()
    own = available.get(name)
    if own is None:
        return None
    if len(extracted.functions) == 1 and not extracted.imports:
        return Contribution(own, (), own.source, _broken([own]))
    needed, names = _closure(own, available, frozenset(team))
    imports = tuple(i.source for i in extracted.imports if _is_needed(i, names))
    source = "\n\n\n".join(function.source for function in [*needed, own])
    return Contribution(own, imports, source, _broken([*needed, own]), tuple(needed))


def imported_names(statement: str) -> set[str]:
    """Names that an import statement binds."""
    aliases = [a for n in ast.walk(ast.parse(statement)) for a in getattr(n, "names", ())]
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}


def _broken(functions: Iterable[Function]) -> tuple[str, ...]:
    return tuple(function.source for function in functions if function.node is None)


def _closure(
    own: Function, available: dict[str, Function], team: frozenset[str]
) -> tuple[list[Function], set[str]]:
    """The functions that ``own`` needs, in the text's order, and all names they mention."""
    names: set[str] = set()
    taken, pending = {own.name}, [own]
    while pending:
        mentioned = pending.pop().names()
        names |= mentioned
        for name in (mentioned & available.keys()) - taken - team:
            taken.add(name)
            pending.append(available[name])
    needed = [f for f in available.values() if f is not own and f.name in taken]
    return needed, names


def _is_needed(statement: Import, names: set[str]) -> bool:
    return statement.is_future or not statement.binds or bool(statement.binds & names)


def preamble(prompt: str, entry_point: str) -> tuple[tuple[str, ...], str]:
    """A prompt's imports, and the source of its complete helper functions.

    Where the prompt parses, its classes and constants count too. The entry point's stub and
    other functions without a body are left out.
    """
    tree = parse(prompt)
    if tree is None:
        extracted = extract(prompt)
        functions = [f for f in extracted.functions if f.node is not None and not _is_stub(f.node)]
        kept = [f.source for f in functions if f.name != entry_point]
        return tuple(i.source for i in extracted.imports), "\n\n\n".join(kept)
    imports, kept = [], []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name != entry_point and not _is_stub(node):
                kept.append(ast.unparse(node))
        elif isinstance(node, ast.ClassDef | ast.Assign | ast.AnnAssign):
            kept.append(ast.unparse(node))
    return tuple(imports), "\n\n\n".join(kept)


def _is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = without_docstring(node)
    return all(
        isinstance(n, ast.Pass) or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        for n in body
    )


def join(prompt: tuple[tuple[str, ...], str], contributions: Iterable[Contribution | None]) -> str:
    """The joint program: preamble, helpers in order, main."""
    parts = [c for c in contributions if c is not None]
    imports = dict.fromkeys([*prompt[0], *(line for part in parts for line in part.imports)])
    first = sorted(imports, key=lambda line: not line.startswith("from __future__"))
    blocks = ["\n".join(first), prompt[1], *(part.source for part in parts)]
    return "\n\n\n".join(block for block in blocks if block) + "\n"


def compile_program(program: str, broken: tuple[str, ...] = ()) -> bytes | SyntaxProblem:
    """The program's marshalled code, or why it does not compile.

    ``broken``: functions in it that do not parse by themselves, or are excessive. Such a program
    never compiles: an open string or bracket of one part could otherwise take in the next, and what
    runs would not be what was read.
    """
    try:
        if broken:
            ast.parse(program, PROGRAM_NAME)
            message = "a function that is not complete, or nested beyond measure"
            return SyntaxProblem(message, None, None, broken[0][:200])
        check_names(program)
        return marshal.dumps(compile(program, PROGRAM_NAME, "exec", dont_inherit=True))
    except SyntaxError as error:
        text = error.text.rstrip("\n")[:200] if error.text else None
        return SyntaxProblem(error.msg or "invalid syntax", error.lineno, error.offset, text)
    except UNPARSABLE as error:
        return SyntaxProblem(f"{type(error).__name__}: {error}"[:200], None, None)
