"""Text that a model wrote → the functions, imports and other statements in it.

A text that parses is read from its syntax tree. Any other text (prose, fences, a cut-off end) is
read in blocks: from a ``def`` line to the first line that is no longer inside it, where strings
and brackets are lexed and everything between the blocks is passed over; likewise from a line that
imports, assigns, or begins a class. Nothing here raises, on any text. A part's source is one
statement and nothing else, by Python's own reading of it; a text of more than 64 KiB is taken to
hold nothing, and of one that does not parse a bounded part is read.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rewards.code.analysis.excess import is_excessive
from rewards.code.analysis.parsing import MAX_BYTES, first_line, is_long, parse, source_of, written
from rewards.code.analysis.scopes import Names

MAX_READ = 8 * MAX_BYTES  # characters in all blocks of a text that does not parse
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Function:
    """A function at the top level of a text."""

    name: str
    source: str  # dedented, decorators included
    returns: bool  # it holds a ``return`` of something, or yields
    node: ast.FunctionDef | ast.AsyncFunctionDef | None  # None: it does not parse, or is excessive

    @property
    def rank(self) -> tuple[bool, bool]:
        return self.returns, self.node is not None

    def names(self) -> frozenset[str]:
        """The module's names that it mentions."""
        if self.node is None:
            return frozenset(_IDENTIFIER.findall(self.source))
        return Names(self.node).of_module


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement at the top level of a text."""

    node: ast.Import | ast.ImportFrom

    @property
    def source(self) -> str:
        return ast.unparse(self.node)

    @property
    def binds(self) -> frozenset[str]:
        """Empty for ``import *``, whose names are not known."""
        names = (a.asname or a.name.partition(".")[0] for a in self.node.names)
        return frozenset(names) - {"*"}

    @property
    def is_future(self) -> bool:
        return isinstance(self.node, ast.ImportFrom) and self.node.module == "__future__"

    def without(self, team: frozenset[str]) -> Import | None:
        """Without the team's functions, which are there already (``from aux import aux``, ``import
        aux``); None where nothing is left."""
        node = self.node
        if isinstance(node, ast.ImportFrom) and node.module not in team:
            return self
        names = team | {"*"} if isinstance(node, ast.ImportFrom) else team
        left = [alias for alias in node.names if alias.name not in names or alias.asname]
        if not left:
            return None
        if isinstance(node, ast.ImportFrom):
            return Import(ast.ImportFrom(node.module, left, node.level))
        return Import(ast.Import(left))


@dataclass(frozen=True, slots=True)
class Setup:
    """Any other statement at the top level of a text that binds or changes names: a class, a
    constant, ``TABLE[1] = 2``, a loop that fills a table, ``try: import …``."""

    source: str
    binds: frozenset[str]
    changes: frozenset[str]  # names of what it changes
    node: ast.stmt | None  # None: it is excessive, or cannot be written by itself

    def names(self) -> frozenset[str]:
        """The module's names that it mentions."""
        return frozenset() if self.node is None else Names(self.node).of_module


Part = Function | Import | Setup


@dataclass(frozen=True, slots=True)
class Extracted:
    """What a text holds, in its order."""

    parts: tuple[Part, ...]

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(part for part in self.parts if isinstance(part, Function))

    @property
    def imports(self) -> tuple[Import, ...]:
        return tuple(part for part in self.parts if isinstance(part, Import))

    def by_name(self) -> dict[str, Function]:
        """Of functions of one name, the last complete one that returns something.

        A repetition that was cut off does not replace the finished function before it.
        """
        best: dict[str, Function] = {}
        for function in self.functions:
            known = best.get(function.name)
            if known is None or function.rank >= known.rank:
                best[function.name] = function
        return best


def extract(text: str) -> Extracted:
    """What stands at the top level of a text, whatever is around it."""
    if is_long(text):
        return Extracted(())
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    lines, tree = text.split("\n"), parse(text)
    return Extracted(tuple(_scan(lines) if tree is None else _parts(tree.body, lines)))


def _parts(body: Sequence[ast.stmt], lines: list[str]) -> Iterator[Part]:
    """The parts that statements are, of the lines that were parsed."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield _function(node, lines, len(body) == 1 and not node.col_offset)
            case ast.Import() | ast.ImportFrom():
                yield Import(node)
            case ast.If(test=ast.Constant(value=value)):
                yield from _parts(node.body if value else node.orelse, lines)
            case _:
                yield from _setup(node, lines)


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], alone: bool
) -> Function:
    returns = any(
        isinstance(n, ast.Yield | ast.YieldFrom)
        or (isinstance(n, ast.Return) and n.value is not None)
        for n in ast.walk(node)
    )
    source = None if is_excessive(node) else source_of(node, lines, alone)
    if source is None:
        return Function(node.name, _text(node, lines), returns, None)
    return Function(node.name, source, returns, node)


def _setup(node: ast.stmt, lines: list[str]) -> Iterator[Setup]:
    binds, changes = Names(node).module_bound, _changed(node)
    if binds or changes:
        source = None if is_excessive(node) else source_of(node, lines)
        if source is None:
            yield Setup(_text(node, lines), binds, changes, None)
        else:
            yield Setup(source, binds, changes, node)


def _text(node: ast.stmt, lines: list[str]) -> str:
    return "\n".join(lines[first_line(node) - 1 : node.end_lineno])


def _changed(node: ast.stmt) -> frozenset[str]:
    """Names of what a statement changes: ``x[…] = …``, ``x.y = …``, ``x.append(…)``."""
    found: list[ast.expr] = [
        n
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute | ast.Subscript) and not isinstance(n.ctx, ast.Load)
    ]
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute() as method)):
            found.append(method)
    return frozenset(name for each in found if (name := _root(each)) is not None)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def without_imports(part: Function | Setup, team: frozenset[str]) -> Function | Setup:
    """A part without the imports of the team's functions within it."""
    tree = parse(part.source + "\n") if part.node is not None and "import" in part.source else None
    if tree is None:
        return part
    remover = _Remover(team)
    source = written(ast.fix_missing_locations(remover.visit(tree)))
    left = parse(source) if remover.removed and source is not None else None
    if left is None or source is None:
        return part
    return replace(part, source=source, node=left.body[0])  # type: ignore[arg-type]


class _Remover(ast.NodeTransformer):
    def __init__(self, team: frozenset[str]) -> None:
        self.team, self.removed = team, False

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> ast.AST:
        left = Import(node).without(self.team)
        if left is not None and len(left.node.names) == len(node.names):
            return node
        self.removed = True
        return ast.Pass() if left is None else left.node

    visit_ImportFrom = visit_Import


# --- texts that do not parse -------------------------------------------------------------------

_DEF = re.compile(r"[ \t]*(?:async[ \t]+)?def[ \t]+(\w+)[ \t]*\(")
_START = re.compile(rf"{_DEF.pattern}|[ \t]*(?:@\w|import[ \t]|from[ \t.])")
_SETUP = re.compile(  # a class, an assignment, a method's call
    r"[ \t]*(?:class[ \t]+\w+[ \t]*[(:]"
    r"|\w[\w., \t]{0,99}(?:\[[^\n]{0,99}\][ \t]*)?(?::[^=\n]{1,99})?[-+*/%&|^@<>]{0,2}=[^=]"
    r"|\w+\.\w+\()"
)
_HEADER = re.compile(r"[ \t]*(?:class|def|async|if|elif|else|for|while|try|except|finally|with)\b")
_ALWAYS = re.compile(r"[ \t]*if[ \t]+(?:True|1)[ \t]*:[ \t]*(?:#.*)?$")
# Lines that cannot stand inside brackets: where one follows, the bracket was never closed.
_STOP = re.compile(rf"{_START.pattern}|[ \t]*(?:```|~~~|class[ \t]+\w+[ \t]*[(:])")
_LEXEME = re.compile(r"'''|\"\"\"|'|\"|#|[()\[\]{}]")
_RETURN = re.compile(r"\breturn\b[ \t]*[^\s;]")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")


def _scan(lines: list[str]) -> list[Part]:
    parts: list[Part] = []
    enclosing: list[tuple[int, bool]] = []  # indentation of a line, whether code hangs below it
    index = read = 0
    while index < len(lines) and read < MAX_READ:
        line, end = lines[index], index + 1
        if line.strip():
            indent = _indent(line)
            while enclosing and enclosing[-1][0] >= indent:
                enclosing.pop()
            nested = bool(enclosing) and enclosing[-1][1]
            starts, sets_up = _START.match(line), _SETUP.match(line)
            if (starts or sets_up) and not nested:
                block = _Block(lines, index)
                read += block.size
                found = [*_read(block)]
                parts.extend(found)
                if found or starts:
                    end = block.end if found else max(end, block.header)
            elif "'''" in line or '"""' in line:
                block = _Block(lines, index)
                read += block.size
                if parse(block.source):  # else it is not a string
                    end = block.end
            enclosing.append((indent, nested or _is_header(line)))
        index = end
    return parts


def _read(block: _Block) -> Iterable[Part]:
    """What a block holds: a function, or other statements, or nothing."""
    source = block.source
    tree = parse(source + "\n")  # a line has to follow a backslash
    if tree is not None and tree.body:
        parts = _parts(tree.body, source.split("\n"))
        return islice(parts, 1) if isinstance(tree.body[0], _DEFINITION) else parts
    head = _DEF.match(block.lines[block.header - block.start])
    if head is None:
        return ()
    return (Function(head[1], source, bool(_RETURN.search(block.code)), None),)


def _is_header(line: str) -> bool:
    """Whether a line opens a block of code that need not run; prose that ends with a colon does
    not."""
    if not _HEADER.match(line) or _ALWAYS.match(line):
        return False
    source = line.strip()
    if source.startswith(("elif", "else", "except", "finally")):
        return True
    return parse(f"{source} pass") is not None or source.startswith(
        ("try", "def", "async", "class")
    )


def _indent(line: str) -> int:
    expanded = line[: len(line) - len(line.lstrip())].expandtabs(8)
    return len(expanded)


class _Block:
    """The lines of one definition or statement, found by indentation, strings and brackets.

    ``header`` is the line after the decorators; ``code`` the text without strings and comments.
    A triple-quoted string that is never closed is read as text (``strings=False``), so that it
    does not swallow what follows.
    """

    def __init__(self, lines: list[str], start: int) -> None:
        self.start = start
        if self._take(lines, strings=True):
            self._take(lines, strings=False)
        self.lines = lines[start : self.end]

    def _take(self, lines: list[str], *, strings: bool) -> str:
        """Find where it ends; the quote of a string that is never closed."""
        start, self.header, self.end = self.start, -1, self.start
        indent, code = _indent(lines[start]), []
        quote, depth, continued = "", 0, False
        for index in range(start, len(lines)):
            line = lines[index]
            inside = bool(quote or depth or continued)
            if self.header < 0 and not inside and not line.lstrip().startswith("@"):
                self.header = index
            elif self.header >= 0 and not quote:
                if _STOP.match(line) and _indent(line) <= indent:
                    break
                if not inside and (not line.strip() or line.lstrip().startswith("#")):
                    continue  # part of the block only if more of it follows
                if not inside and _indent(line) <= indent:
                    break
            bare, quote, depth = _lex(line, quote, depth, strings)
            continued = not quote and bare.endswith("\\")
            code.append(bare)
            self.end = index + 1
        self.header, self.code = max(self.header, start), "\n".join(code)
        return quote

    @property
    def size(self) -> int:
        """Characters."""
        return sum(map(len, self.lines))

    @property
    def source(self) -> str:
        """Dedented; where there is nothing to take away, to the letter."""
        text = "\n".join(self.lines)
        return textwrap.dedent(text) if _indent(self.lines[0]) else text


def _lex(line: str, quote: str, depth: int, strings: bool) -> tuple[str, str, int]:
    """One line: its code with strings emptied and comments dropped; open quote; open brackets."""
    bare: list[str] = []
    position = 0
    while True:
        if quote:  # inside a triple-quoted string, or one that a backslash continues
            close = _closing(line, quote, position)
            if close < 0:
                goes_on = len(quote) == 3 or _is_continued(line)
                return "".join(bare), quote if goes_on else "", depth
            position, quote = close, ""
        match = _LEXEME.search(line, position)
        if match is None:
            return "".join(bare) + line[position:], "", depth
        bare.append(line[position : match.start()])
        lexeme, position = match[0], match.end()
        if lexeme == "#":
            return "".join(bare), "", depth
        if lexeme in "([{":
            depth += 1
            bare.append(lexeme)
        elif lexeme in ")]}":
            depth = max(0, depth - 1)
            bare.append(lexeme)
        else:
            bare.append("''")
            if len(lexeme) == 3:
                quote = lexeme if strings else ""
            else:
                close = _closing(line, lexeme, position)
                if close < 0 and strings and _is_continued(line):
                    return "".join(bare), lexeme, depth
                position = close if close >= 0 else len(line)


def _is_continued(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _closing(line: str, quote: str, position: int) -> int:
    """The position after the closing quote, or −1."""
    while True:
        close = line.find(quote, position)
        if close < 0:
            return -1
        before = line[position:close]
        if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return close + len(quote)
        position = close + 1
