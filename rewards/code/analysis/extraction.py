"""Extracts the functions and other statements at the top level of a text that a model wrote.

A text that parses is read from its syntax tree. Any other text (prose, fences, a cut-off end) is
read in blocks. A block reaches from a line that may begin a statement to the last line inside it,
which is found by lexing strings and brackets. A block that does not parse is skipped unless it
begins a function. Nothing here raises an error, for any text. Each part's source parses to exactly
one statement. A text of more than 64 KiB counts as empty, and only a bounded amount is read of one
that does not parse.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from comlrl.rewards.code.analysis.excess import is_excessive
from comlrl.rewards.code.analysis.parsing import first_line, is_long, parse, source_of
from comlrl.rewards.code.analysis.scopes import Definition, Names

MAX_PROSE = 20  # statements in a text up to which headers may be taken for prose
MAX_READ = 8  # limit on reading a text that does not parse, in multiples of its size
_EFFECT = ast.Call | ast.NamedExpr | ast.Await


@dataclass(frozen=True, slots=True)
class Function:
    """A function at the top level of a text."""

    name: str
    source: str  # dedented, decorators included
    returns: bool  # it contains a ``return`` of a value, or a ``yield``
    node: ast.FunctionDef | ast.AsyncFunctionDef | None  # None: it does not parse or is excessive

    @property
    def rank(self) -> tuple[bool, bool]:
        return self.returns, self.node is not None


@dataclass(frozen=True, slots=True)
class Statement:
    """Any other statement at the top level of a text."""

    source: str
    node: ast.stmt

    @property
    def is_future(self) -> bool:
        return isinstance(self.node, ast.ImportFrom) and self.node.module == "__future__"


Part = Function | Statement


@dataclass(frozen=True, slots=True)
class Extracted:
    """The parts of a text, in order."""

    parts: tuple[Part, ...]

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(part for part in self.parts if isinstance(part, Function))

    def by_name(self) -> dict[str, Function]:
        """Return the best function of each name: the last of those that return a value and parse.

        A repetition that was cut off does not replace the complete function before it.
        """
        best: dict[str, Function] = {}
        for function in self.functions:
            earlier = best.get(function.name)
            if earlier is None or function.rank >= earlier.rank:
                best[function.name] = function
        return best


def extract(text: str) -> Extracted:
    """Extract the top-level code of a text, whatever surrounds it."""
    if is_long(text):
        return Extracted(())
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    tree = parse(text)
    if tree is None and "\ufeff" in text:  # from concatenated files
        text = re.sub(r"^([ \t]*)\ufeff", r"\1", text, flags=re.MULTILINE)
        tree = parse(text)
    lines = text.split("\n")
    return Extracted(tuple(_scan(lines) if tree is None else _parts(tree.body, lines)))


def _parts(body: Sequence[ast.stmt], lines: list[str]) -> Iterator[Part]:
    """Yield the parts of statements that were parsed from ``lines``."""
    for node in body:
        match node:
            case ast.With() | ast.If() | ast.While() | ast.For() if _is_prose(node, body):
                yield from _parts(node.body, lines)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield _function(node, lines, len(body) == 1 and not node.col_offset)
            case ast.If(test=ast.Constant(value=value)):
                yield from _parts(node.body if value else node.orelse, lines)
            case ast.Expr(value=value) if not any(isinstance(n, _EFFECT) for n in ast.walk(value)):
                pass  # a docstring, an output or a word, without effect
            case _:
                source = None if is_excessive(node) else source_of(node, lines)
                if source is not None:
                    yield Statement(source, node)


def _is_prose(node: ast.With | ast.If | ast.While | ast.For, body: Sequence[ast.stmt]) -> bool:
    """Return whether a header is prose ("with this in mind:").

    It is prose if its body defines a function and no other statement binds the header's names.
    """
    if len(body) > MAX_PROSE or not any(isinstance(inner, Definition) for inner in node.body):
        return False
    header = [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]
    words = {
        n.id
        for part in header
        for n in ast.walk(part)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }
    bound = (Names(statement).module_bound for statement in body if statement is not node)
    return bool(words) and words.isdisjoint(dir(builtins)) and all(map(words.isdisjoint, bound))


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
        text = "\n".join(lines[first_line(node) - 1 : node.end_lineno])
        return Function(node.name, text, returns, None)
    return Function(node.name, source, returns, node)


# --- texts that do not parse -------------------------------------------------------------------

_DEF = re.compile(r"[ \t]*(?:async[ \t]+)?def[ \t]+(\w+)[ \t]*\(")
_START = re.compile(rf"{_DEF.pattern}|[ \t]*(?:@\w|import[ \t]|from[ \t.])")
_CODE = re.compile(  # a line that may begin another statement, if its block parses
    r"[ \t]*(?:(?:class|for|while|if|with|try|match|async|assert|del)\b|[\w(\[{][^\n]*[=(])"
)
_COMPOUND = re.compile(r"[ \t]*(?:for|while|if|with|try|async[ \t]+(?:for|with))\b")
_CLAUSE = re.compile(r"[ \t]*(?:elif|else|except|finally)\b")
_HEADER = re.compile(rf"{_DEF.pattern}|[ \t]*class[ \t]+\w+[ \t]*[(:]")
_ALWAYS = re.compile(r"[ \t]*if[ \t]+(?:True|1)[ \t]*:[ \t]*(?:#.*)?$")
# Lines that cannot be inside brackets; before one, an open bracket was never closed.
_STOP = re.compile(rf"{_START.pattern}|[ \t]*(?:```|~~~|class[ \t]+\w+[ \t]*[(:])")
# Text before the code on its line: a fence with its language, or tags.
_OPENING = re.compile(
    r"([ \t]*)(?:(?:(?:```|~~~)(?:(?!def|async|class|import|from)\w+[ \t])?|<[^<>]{1,40}>)[ \t]*)+"
)
# The group matches text that is not code outside strings: a fence or tag right after code ends it.
_LEXEME = re.compile(
    r"""'{3}|"{3}|'|"|#|(`|</|<\||\[/|(?:~~~|<\w+>)[ \t]*$)|[()\[\]{}]""", re.ASCII
)
_RETURN = re.compile(r"\breturn\b[ \t]*[^\s;]")


def _scan(lines: list[str]) -> list[Part]:
    parts: list[Part] = []
    enclosing: list[tuple[int, bool, bool]] = []  # indentation, is a header, is or is in one
    budget = MAX_READ * sum(len(line) + 1 for line in lines)
    index = 0
    while index < len(lines) and budget > 0:
        line, end = _without_opening(lines[index]), index + 1
        if line.strip():
            lines[index], indent, follows = line, _indent(line), False
            while enclosing and enclosing[-1][0] >= indent:
                follows = enclosing.pop()[:2] == (indent, True)
            nested = bool(enclosing) and enclosing[-1][2]
            starts, block = _START.match(line), None
            if (starts or _CODE.match(line)) and not nested:
                block = _Block(lines, index)
                new_parts = [*_read(block)]
                parts.extend(new_parts)
                if new_parts or starts:
                    end = block.end if new_parts else max(end, block.header)
            elif "'''" in line or '"""' in line:
                block = _Block(lines, index)
                if parse(block.source):  # skip a string as a whole
                    end = block.end
            budget -= block.size if block is not None else 0
            clause = block is not None and block.has_clause
            is_header = not nested and _is_header(line, follows, clause)
            enclosing.append((indent, is_header, nested or is_header))
        index = end
    return parts


def _without_opening(line: str) -> str:
    """Remove the fence or tags before the code on a line."""
    opening = _OPENING.match(line)
    if opening is None:
        return line
    rest = opening[1] + line[opening.end() :]
    return rest if _START.match(rest) or _CODE.match(rest) else line


def _read(block: _Block) -> Iterable[Part]:
    """Yield the parts of a block: statements, a function that does not parse, or nothing."""
    source = block.source
    tree = parse(source + "\n")  # a trailing backslash needs a next line
    if tree is not None and tree.body:
        return _parts(tree.body, source.split("\n"))
    head = _DEF.match(block.lines[block.header - block.start])
    if head is None:
        return ()
    return (Function(head[1], source, bool(_RETURN.search(block.code)), None),)


def _is_header(line: str, follows: bool, has_clause: bool) -> bool:
    """Return whether a line opens a block of code that might not run; prose ending in ":" does not.

    ``follows`` says that the previous line with this indentation is such a header, ``has_clause``
    that an ``else`` or similar clause belongs to the line.
    """
    source = line.partition("#")[0].strip()
    if _HEADER.match(line):
        return True
    if source == "try:":
        return has_clause
    if not source.endswith(":") or _ALWAYS.match(line):
        return False
    if _CLAUSE.match(line):
        before = "try: pass\n" if source.startswith(("except", "finally")) else "if 1: pass\n"
        return follows and parse(f"{before}{source} pass") is not None
    return bool(_COMPOUND.match(line)) and parse(f"{source} pass") is not None


def _indent(line: str) -> int:
    expanded = line[: len(line) - len(line.lstrip())].expandtabs(8)
    return len(expanded)


class _Block:
    """The lines of one definition or statement, found by indentation, strings and brackets.

    ``header`` is the index of the line after the decorators, ``code`` the text without strings and
    comments, and ``size`` the number of characters read. An unclosed triple-quoted string is read
    as text (``strings=False``), so that it does not swallow the following lines.
    """

    def __init__(self, lines: list[str], start: int) -> None:
        self.start, self.size = start, 0
        if self._take(lines, strings=True):
            self._take(lines, strings=False)

    def _take(self, lines: list[str], *, strings: bool) -> str:
        """Find the end of the block; return the quote of an unclosed string, or ""."""
        start, self.header, self.end = self.start, -1, self.start
        indent, code, last = _indent(lines[start]), [], ""
        compound, self.has_clause = _COMPOUND.match(lines[start]), False
        quote, depth, continued = "", 0, False
        for index in range(start, len(lines)):
            line = lines[index]
            self.size += len(line) + 1
            inside = bool(quote or depth or continued)
            if self.header < 0 and not inside and not line.lstrip().startswith("@"):
                self.header = index
            elif self.header >= 0 and not quote:
                if _STOP.match(line) and _indent(line) <= indent:
                    break
                if not inside and (not line.strip() or line.lstrip().startswith("#")):
                    continue  # part of the block only if more lines of it follow
                if not inside and _indent(line) <= indent:
                    if not (compound and _CLAUSE.match(line) and _indent(line) == indent):
                        break
                    self.has_clause = True
            bare, quote, depth, length = _lex(line, quote, depth, strings)
            continued = not quote and bare.endswith("\\")
            code.append(bare)
            self.end, last = index + 1, line[:length]
            if length < len(line):
                break
        self.header, self.code = max(self.header, start), "\n".join(code)
        self.lines = [*lines[start : self.end - 1], last]
        return quote

    @property
    def source(self) -> str:
        """The dedented source; verbatim if the first line is not indented."""
        text = "\n".join(self.lines)
        return textwrap.dedent(text) if _indent(self.lines[0]) else text


def _lex(line: str, quote: str, depth: int, strings: bool) -> tuple[str, str, int, int]:
    """Lex a line, given the open quote and the number of open brackets before it.

    Returns its code with strings emptied and comments removed, the open quote and brackets after
    it, and the length of the part of the line that is code.
    """
    bare: list[str] = []
    position, length = 0, len(line)
    while True:
        if quote:  # inside a triple-quoted string or one continued by a backslash
            close = _closing(line, quote, position)
            if close < 0:
                goes_on = len(quote) == 3 or _is_continued(line)
                return "".join(bare), quote if goes_on else "", depth, length
            position, quote = close, ""
        match = _LEXEME.search(line, position)
        if match is None:
            return "".join(bare) + line[position:], "", depth, length
        bare.append(line[position : match.start()])
        lexeme, position = match[0], match.end()
        if lexeme == "#" or match[1]:
            return "".join(bare), "", depth, match.start() if match[1] else length
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
                    return "".join(bare), lexeme, depth, length
                position = close if close >= 0 else length


def _is_continued(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _closing(line: str, quote: str, position: int) -> int:
    """Return the position after the closing quote, or −1 if there is none."""
    while True:
        close = line.find(quote, position)
        if close < 0:
            return -1
        before = line[position:close]
        if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return close + len(quote)
        position = close + 1
