"""What each agent contributes to the joint program, and how main uses the helpers.

Everything here is read from the text; nothing is run.
"""

from __future__ import annotations

import ast
import marshal
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from comlrl.types import SyntaxProblem
from rewards.extraction import UNPARSABLE, Function, Import, extract, parse
from rewards.harmless import is_harmless

PROGRAM_NAME = "<program>"  # the file name of the joint program, in tracebacks
warnings.filterwarnings("ignore", module=re.escape(PROGRAM_NAME))  # of model-written code


@dataclass(frozen=True, slots=True)
class Contribution:
    """One agent's own definition, with the imports and functions of its text that it needs."""

    function: Function
    imports: tuple[str, ...]
    source: str  # what it needs, then its own definition
    harmless: bool  # all of that

    @property
    def defined(self) -> bool:
        return self.function.returns


@dataclass(frozen=True, slots=True)
class MainUse:
    """How main uses the helpers."""

    called: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # called as a bare statement, or into a name never read
    wrapper: bool = False  # main only hands on a helper's result


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
        return Contribution(own, (), own.source, _all_harmless([own], ()))
    needed, names = _closure(own, available, frozenset(team))
    imports = tuple(i.source for i in extracted.imports if _is_needed(i, names))
    functions = [*needed, own]
    source = "\n\n\n".join(function.source for function in functions)
    return Contribution(own, imports, source, _all_harmless(functions, imports))


def _all_harmless(functions: Iterable[Function], imports: Iterable[str]) -> bool:
    return all(f.node is not None and is_harmless(f.node) for f in functions) and all(
        is_harmless(ast.parse(line)) for line in imports
    )


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
    body = _without_docstring(node)
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


def is_harmless_text(source: str) -> bool:
    """Whether a source parses and all of it is harmless."""
    tree = parse(source)
    return tree is not None and is_harmless(tree)


def compile_program(program: str) -> bytes | SyntaxProblem:
    """The program's marshalled code, or why it does not compile."""
    try:
        return marshal.dumps(compile(program, PROGRAM_NAME, "exec", dont_inherit=True))
    except SyntaxError as error:
        text = error.text.rstrip("\n")[:200] if error.text else None
        return SyntaxProblem(error.msg or "invalid syntax", error.lineno, error.offset, text)
    except UNPARSABLE as error:
        return SyntaxProblem(f"{type(error).__name__}: {error}"[:200], None, None)


# --- how main uses the helpers -----------------------------------------------------------------


def main_use(main: Function, helpers: Sequence[str]) -> MainUse:
    """Calls of the helpers in main's definition. A name that main binds itself is no helper."""
    if main.node is None or not helpers:
        return MainUse()
    nodes = list(ast.walk(main.node))
    own = _bound(main.node, nodes)
    present = frozenset(helpers) - own
    calls = {_called(node, present) for node in nodes}
    ignored = _ignored(nodes, present)
    return MainUse(
        called=tuple(name for name in helpers if name in calls),
        ignored=tuple(name for name in helpers if name in ignored),
        wrapper=_is_wrapper(main.node, present),
    )


def _called(node: ast.AST, helpers: frozenset[str]) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in helpers:
        return node.func.id
    return None


def _calls_in(node: ast.AST, helpers: frozenset[str]) -> set[str]:
    return {name for n in ast.walk(node) if (name := _called(n, helpers)) is not None}


def _bound(main: ast.FunctionDef | ast.AsyncFunctionDef, nodes: list[ast.AST]) -> set[str]:
    """Names that are main's own: parameters, assigned names, nested functions and classes."""
    names = {n.arg for n in nodes if isinstance(n, ast.arg)}
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    nested = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return names | {n.name for n in nodes if isinstance(n, nested) and n is not main}


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def _is_wrapper(main: ast.FunctionDef | ast.AsyncFunctionDef, helpers: frozenset[str]) -> bool:
    """``return …aux(…)…``, or ``x = aux(…)`` and ``return x``."""
    match _without_docstring(main):
        case [ast.Return(value=ast.expr() as value)]:
            return bool(_calls_in(value, helpers))
        case [
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.Call() as value),
            ast.Return(value=ast.Name(id=returned)),
        ]:
            return name == returned and _called(value, helpers) is not None
    return False


def _ignored(nodes: list[ast.AST], helpers: frozenset[str]) -> set[str]:
    """Helpers with a call that is a bare statement, or whose value goes to names never read."""
    read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    ignored: set[str] = set()
    for node in nodes:
        match node:
            case ast.Expr(value=ast.NamedExpr(target=target, value=value)):
                unread = target.id not in read
            case ast.Expr(value=value):
                # print(aux(x)) reads the result; aux(x) and [aux(x)] do not
                calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
                unread = all(_called(call, helpers) for call in calls)
            case ast.Assign(targets=targets, value=value):
                unread = all(_never_read(target, read) for target in targets)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                unread = _never_read(target, read)
            case _:
                continue
        if unread:
            ignored |= _calls_in(value, helpers)
    return ignored


def _never_read(target: ast.expr, read: set[str]) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return all(_never_read(element, read) for element in target.elts)
    if isinstance(target, ast.Starred):
        return _never_read(target.value, read)
    return isinstance(target, ast.Name) and target.id not in read
