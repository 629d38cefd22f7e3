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
from functools import lru_cache

from rewards.code.analysis.extraction import (
    Extracted,
    Function,
    Import,
    Setup,
    extract,
    without_imports,
)
from rewards.code.analysis.parsing import UNPARSABLE, parse
from rewards.code.analysis.scopes import Names
from rewards.code.analysis.statement_use import without_docstring
from rewards.code.bounds import check_names
from rewards.code.breakdown import SyntaxProblem

PROGRAM_NAME = "<program>"  # the file name of the joint program, in tracebacks
warnings.filterwarnings("ignore", module=re.escape(PROGRAM_NAME))  # of model-written code


MAX_PROMPT = 1 << 20  # bytes; a prompt is the task's own text, not a model's


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One agent's own definition, with all of its text that it needs."""

    function: Function
    imports: tuple[str, ...]
    source: str  # its own definition and what it needs, in the text's order
    broken: tuple[str, ...] = ()  # sources in it that do not parse, or are excessive
    support: tuple[Function | Setup, ...] = ()  # what it needs beside imports
    imported: frozenset[str] = frozenset()  # names that the imports bind

    @property
    def defined(self) -> bool:
        return self.function.returns

    @property
    def reads(self) -> frozenset[str]:
        """Names of the module that it reads."""
        nodes = (part.node for part in (self.function, *self.support))
        return frozenset().union(*(Names(node).module_reads for node in nodes if node is not None))


def contribution(text: str, name: str, team: Sequence[str]) -> Contribution | None:
    """What a text adds to the program as the definition of ``name``; None where it has none.

    ``team`` holds every name that some agent is to define; the others' names are never taken
    from this text.
    """
    extracted, others = extract(text), frozenset(team)
    own = extracted.by_name().get(name)
    if own is None:
        return None
    needed, names = (
        ([own], set()) if extracted.parts == (own,) else _closure(own, extracted, others)
    )
    parts = [without_imports(part, others) for part in needed]
    function = parts[next(i for i, part in enumerate(needed) if part is own)]
    assert isinstance(function, Function)
    left = [statement.without(others) for statement in extracted.imports]
    imports = [s for s in left if s is not None and _is_needed(s, names)]
    return Contribution(
        function=function,
        imports=tuple(statement.source for statement in imports),
        source="\n\n\n".join(part.source for part in parts),
        broken=tuple(part.source for part in parts if part.node is None),
        support=tuple(part for part in parts if part is not function),
        imported=frozenset().union(*(statement.binds for statement in imports)),
    )


def _closure(
    own: Function, extracted: Extracted, team: frozenset[str]
) -> tuple[list[Function | Setup], set[str]]:
    """``own`` and what it needs beside imports, in the text's order, and all names they mention."""
    makers: dict[str, list[Function | Setup]] = {}
    for name, function in extracted.by_name().items():
        makers[name] = [function]
    modules = frozenset().union(*(statement.binds for statement in extracted.imports))
    for part in extracted.parts:
        if isinstance(part, Setup) and own.name not in part.binds:
            for name in part.binds | (part.changes - modules):
                makers.setdefault(name, []).append(part)
    names: set[str] = set()
    taken, pending = {id(own)}, [own.names()]
    while pending:
        fresh = pending.pop() - names
        names |= fresh
        for part in (p for n in fresh - (team - {own.name}) for p in makers.get(n, ())):
            if id(part) not in taken:
                taken.add(id(part))
                pending.append(part.names())
    chosen = (part for part in extracted.parts if id(part) in taken)
    return [part for part in chosen if not isinstance(part, Import)], names


def _is_needed(statement: Import, names: set[str]) -> bool:
    return statement.is_future or not statement.binds or bool(statement.binds & names)


def preamble(prompt: str, entry_point: str) -> tuple[tuple[str, ...], str]:
    """A prompt's imports, and the source of its complete helper functions.

    Where the prompt parses, its classes and constants count too. The entry point's stub and
    other functions without a body are left out.
    """
    tree = parse(prompt, MAX_PROMPT)
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


@lru_cache(maxsize=1024)
def read_names(source: str) -> frozenset[str]:
    """Names of the module that a prompt's functions read."""
    tree = parse(source, MAX_PROMPT)
    return (
        frozenset().union(*(Names(node).module_reads for node in tree.body))
        if tree
        else frozenset()
    )


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


def compile_program(
    program: str, broken: tuple[str, ...] = (), asserts: bool = True
) -> bytes | SyntaxProblem:
    """The program's marshalled code, with or without its asserts, or why it does not compile.

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
        optimize = 0 if asserts else 1
        code = compile(program, PROGRAM_NAME, "exec", dont_inherit=True, optimize=optimize)
        return marshal.dumps(code)
    except SyntaxError as error:
        text = error.text.rstrip("\n")[:200] if error.text else None
        return SyntaxProblem(error.msg or "invalid syntax", error.lineno, error.offset, text)
    except UNPARSABLE as error:
        return SyntaxProblem(f"{type(error).__name__}: {error}"[:200], None, None)
