"""Assembles the joint program from the agents' texts.

The texts are only parsed and compiled; nothing is run.
"""

from __future__ import annotations
import __future__

import ast
import functools
import marshal
import operator
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from comlrl.rewards.code.analysis.extraction import (
    Definition,
    Extracted,
    Function,
    Part,
    Statement,
    extract,
)
from comlrl.rewards.code.analysis.other_agents import without_others
from comlrl.rewards.code.analysis.parsing import UNPARSABLE, parse, written
from comlrl.rewards.code.analysis.scopes import Names
from comlrl.rewards.code.analysis.usage import without_docstring
from comlrl.rewards.code.bounds import check_names
from comlrl.rewards.code.breakdown import SyntaxProblem
from comlrl.rewards.sandbox.inside.candidate import ENTERED

PROGRAM_NAME = "<program>"  # the file name of the joint program, in tracebacks
warnings.filterwarnings("ignore", module=re.escape(PROGRAM_NAME))  # about model-written code


MAX_PROMPT = 1 << 20  # bytes; a prompt is the task's own text, not a model's
_IMPORT = ast.Import | ast.ImportFrom
_IDENTIFIER = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """The part of the joint program that comes from one agent's text."""

    function: Function  # the agent's function
    imports: tuple[str, ...]  # from ``__future__``
    source: str  # of the function and the other statements, in their order
    broken: tuple[str, ...] = ()  # functions in it that do not parse or are excessive
    nodes: tuple[ast.stmt, ...] = ()  # its statements

    @property
    def defined(self) -> bool:
        return self.function.returns

    @property
    def reads(self) -> frozenset[str]:
        """The module's names that it reads."""
        return frozenset().union(*(Names(node).module_reads for node in self.nodes))


def contribution(text: str, name: str, team: Sequence[str]) -> Contribution | None:
    """Return a text's contribution as the author of ``name``, or None if it does not define it.

    ``team`` lists the names of all agents' functions; definitions of the other agents' names are
    removed from the text.
    """
    extracted, others = extract(text), frozenset(team) - {name}
    function = extracted.by_name().get(name)
    if function is None:
        return None
    parts = [*_complete(extracted, function)]
    left = [part for p in parts if _runs(p) and (part := without_others(p, others)) is not None]
    future = [part for part in left if isinstance(part, Statement) and part.is_future]
    rest = [part for part in left if not (isinstance(part, Statement) and part.is_future)]
    return Contribution(
        function=next(p for p in reversed(rest) if isinstance(p, Function) and p.name == name),
        imports=tuple(part.source for part in future),
        source="".join(_separated(rest)),
        broken=tuple(part.source for part in rest if part.node is None),
        nodes=tuple(part.node for part in rest if part.node is not None),
    )


def _separated(parts: Sequence[Part]) -> Iterator[str]:
    """Yield sources and the separators between them: two empty lines around functions."""
    for before, part in zip([None, *parts], parts, strict=False):
        if before is not None:
            statements = isinstance(before, Statement) and isinstance(part, Statement)
            yield "\n" if statements else "\n\n\n"
        yield part.source


def _complete(extracted: Extracted, function: Function) -> Iterator[Part]:
    """Yield the parts without later redefinitions of ``function`` and incomplete functions.

    Incomplete functions stay if the rest of the text mentions them.
    """
    parts, best = extracted.parts, extracted.by_name()
    complete = (part.source for part in parts if part.node is not None or part is function)
    names = frozenset(name for source in complete for name in _IDENTIFIER.findall(source))
    is_behind = False
    for part in parts:
        is_behind |= part is function
        if not isinstance(part, Function):
            yield part
        elif part.node is None:
            if part is function or (part is best[part.name] and part.name in names):
                yield part
        elif part is function or part.name != function.name or not is_behind:
            yield part


def _runs(part: Part) -> bool:
    """Return whether a part compiles at module level and is not a ``__main__`` block."""
    if isinstance(part, Function):
        return True
    match part.node:
        case ast.If(test=ast.Compare(ops=[ast.Eq()], left=left, comparators=[right])):
            if "__name__" in (getattr(left, "id", ""), getattr(right, "id", "")):
                return False
    try:
        check_names(part.source)
        compile(ast.Module([part.node], []), PROGRAM_NAME, "exec", dont_inherit=True)
    except UNPARSABLE:
        return False
    return True


def preamble(prompt: str, entry_point: str) -> tuple[tuple[str, ...], str]:
    """Return a prompt's imports, and the source of its complete helper functions.

    If the prompt parses, its classes and constants are included too. The entry point's stub and
    other functions without a body are left out.
    """
    tree = parse(prompt, MAX_PROMPT)
    if tree is None:
        extracted = extract(prompt)
        functions = [f for f in extracted.functions if f.node is not None and not _is_stub(f.node)]
        sources = [f.source for f in functions if f.name != entry_point]
        imports_of = (p.source for p in extracted.parts if isinstance(p.node, _IMPORT))
        return tuple(imports_of), "\n\n\n".join(sources)
    imports: list[str | None] = []
    definitions: list[str | None] = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(written(node))
        elif isinstance(node, Definition):
            if node.name != entry_point and not _is_stub(node):
                definitions.append(written(node))
        elif isinstance(node, ast.ClassDef | ast.Assign | ast.AnnAssign):
            definitions.append(written(node))
    return tuple(filter(None, imports)), "\n\n\n".join(filter(None, definitions))


@functools.lru_cache(maxsize=1024)
def read_names(source: str) -> frozenset[str]:
    """Return the module's names that a prompt's functions read."""
    tree = parse(source, MAX_PROMPT)
    body = tree.body if tree is not None else []
    return frozenset().union(*(Names(node).module_reads for node in body))


def _is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = without_docstring(node.body)
    return all(
        isinstance(n, ast.Pass) or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        for n in body
    )


def join(prompt: tuple[tuple[str, ...], str], contributions: Iterable[Contribution | None]) -> str:
    """Return the joint program: ``prompt`` (its imports and functions), helpers in order, main."""
    parts = [c for c in contributions if c is not None]
    imports = dict.fromkeys([*prompt[0], *(line for part in parts for line in part.imports)])
    first = sorted(imports, key=lambda line: not line.startswith("from __future__"))
    blocks = ["\n".join(first), prompt[1], *(part.source for part in parts)]
    return "\n\n\n".join(block for block in blocks if block) + "\n"


def compile_program(
    program: str,
    broken: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    main_line: int = 0,
    asserts: bool = True,
) -> bytes | SyntaxProblem:
    """Compile the program for ``comlrl.rewards.sandbox.inside.candidate``.

    Returns its marshalled code, or the reason why it does not compile.

    Args:
        broken: functions in it that do not parse by themselves or are excessive. If there are any,
            the program does not compile: an unclosed string or bracket of one part could otherwise
            swallow the next, so the program would not be the one that was analyzed.
        names: the agents' functions, the entry point last. Their definitions must succeed; any
            other statement may fail. Helpers report that they run.
        main_line: the 1-based line at which the main agent's part begins.
        asserts: whether asserts are compiled.
    """
    try:
        tree = ast.parse(program, PROGRAM_NAME)
        if broken:
            message = "a function that is not complete, or nested beyond measure"
            return SyntaxProblem(message, None, None, broken[0][:200])
        check_names(program)
        optimize = 0 if asserts else 1
        flags = _future_flags(tree)
        statements = []
        for node in tree.body:
            is_definition = isinstance(node, Definition) and node.name in names
            if isinstance(node, Definition) and node.name in names[:-1]:
                call = ast.parse(f"{ENTERED}({node.name!r})").body
                ast.increment_lineno(call[0], node.lineno - 1)
                start = len(node.body) - len(without_docstring(node.body))
                node.body[start:start] = call
            module = ast.Module([node], type_ignores=[])
            code = compile(module, PROGRAM_NAME, "exec", flags, True, optimize)
            binds = tuple(Names(node).module_bound)
            statements.append((code, is_definition, node.lineno >= main_line, binds))
        return marshal.dumps(statements)
    except SyntaxError as error:
        text = error.text.rstrip("\n")[:200] if error.text else None
        return SyntaxProblem(error.msg or "invalid syntax", error.lineno, error.offset, text)
    except UNPARSABLE as error:
        return SyntaxProblem(f"{type(error).__name__}: {error}"[:200], None, None)


def _future_flags(tree: ast.Module) -> int:
    """Return the flags that ``from __future__ import …`` sets for every statement."""
    features = (
        getattr(__future__, alias.name, None)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    )
    return functools.reduce(operator.or_, (f.compiler_flag for f in features if f), 0)
