"""Text that a model wrote → the functions and imports in it.

A text that parses is read from its syntax tree. Any other text (prose, fences, a cut-off end) is
read in blocks: from a ``def`` line to the first line that is no longer inside it, where strings
and brackets are lexed and everything between the blocks is passed over. Nothing here raises, on
any text. A function's source is one definition and nothing else, by Python's own reading of it;
a text of more than 64 KiB is taken to hold nothing, for the parser's sake, and of one that does not
parse a bounded part is read.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass

from rewards.code.excess import is_excessive

MAX_BYTES = 64 << 10  # of a text; deeper nesting than fits in here has crashed Python's parser
MAX_READ = 8 * MAX_BYTES  # characters in all blocks of a text that does not parse
TEXT_NAME = "<completion>"  # the file name under which completions are parsed
UNPARSABLE = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)

# Completions are full of invalid escapes and `is` with literals; their warnings help nobody.
warnings.filterwarnings("ignore", module=re.escape(TEXT_NAME))


@dataclass(frozen=True, slots=True)
class Function:
    """A function at the top level of a text."""

    name: str
    source: str  # dedented, decorators included
    returns: bool  # it holds a ``return`` of something
    node: ast.FunctionDef | ast.AsyncFunctionDef | None  # None: it does not parse, or is excessive

    @property
    def rank(self) -> tuple[bool, bool]:
        return self.returns, self.node is not None

    def names(self) -> frozenset[str]:
        """Identifiers that it mentions."""
        if self.node is None:
            return frozenset(_IDENTIFIER.findall(self.source))
        return frozenset(n.id for n in ast.walk(self.node) if isinstance(n, ast.Name))


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement at the top level of a text."""

    source: str
    binds: frozenset[str]  # empty for ``import *``, whose names are not known

    @property
    def is_future(self) -> bool:
        return self.source.startswith("from __future__")


@dataclass(frozen=True, slots=True)
class Extracted:
    """What a text holds, in its order."""

    functions: tuple[Function, ...]
    imports: tuple[Import, ...]

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


def parse(source: str) -> ast.Module | None:
    """The syntax tree, or None where there is none."""
    try:
        return ast.parse(source, TEXT_NAME)
    except UNPARSABLE:
        return None


def extract(text: str) -> Extracted:
    """Functions and imports at the top level of a text, whatever stands around them."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "replace")) > MAX_BYTES:
        return Extracted((), ())
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    tree = parse(text)
    if tree is None:
        return _scan(text.split("\n"))
    lines = text.split("\n")
    functions, imports = [], []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(_parsed(node, lines))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(_import(node))
    return Extracted(tuple(functions), tuple(imports))


def _parsed(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Function:
    """A definition and the lines that it stands on, of the lines that were parsed."""
    returns = any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(node))
    source = "\n".join(lines[first_line(node) - 1 : node.end_lineno])
    return Function(node.name, source, returns, None if is_excessive(node) else node)


def first_line(node: ast.stmt) -> int:
    """Where a statement begins, decorators included; 1-based."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _import(node: ast.Import | ast.ImportFrom) -> Import:
    binds = frozenset(
        alias.asname or alias.name.partition(".")[0] for alias in node.names if alias.name != "*"
    )
    return Import(ast.unparse(node), binds)


# --- texts that do not parse -------------------------------------------------------------------

_DEF = re.compile(r"[ \t]*(?:async[ \t]+)?def[ \t]+(\w+)[ \t]*\(")
_START = re.compile(rf"{_DEF.pattern}|[ \t]*(?:@\w|import[ \t]|from[ \t.])")
_HEADER = re.compile(r"[ \t]*(?:class|def|async|if|elif|else|for|while|try|except|finally|with)\b")
# Lines that cannot stand inside brackets: where one follows, the bracket was never closed.
_STOP = re.compile(rf"{_START.pattern}|[ \t]*(?:```|~~~|class[ \t]+\w+[ \t]*[(:])")
_LEXEME = re.compile(r"'''|\"\"\"|'|\"|#|[()\[\]{}]")
_RETURN = re.compile(r"\breturn\b[ \t]*[^\s;]")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")


def _scan(lines: list[str]) -> Extracted:
    functions: list[Function] = []
    imports: list[Import] = []
    enclosing: list[tuple[int, bool]] = []  # indentation of a line, whether code hangs below it
    index = read = 0
    while index < len(lines) and read < MAX_READ:
        line, end = lines[index], index + 1
        if line.strip():
            indent = _indent(line)
            while enclosing and enclosing[-1][0] >= indent:
                enclosing.pop()
            nested = bool(enclosing) and enclosing[-1][1]
            if _START.match(line) and not nested:
                block = _Block(lines, index)
                read += block.size
                function, found = _read(block)
                functions.extend(function)
                imports.extend(found)
                end = block.end if function or found else max(end, block.header)
            elif "'''" in line or '"""' in line:
                block = _Block(lines, index)
                read += block.size
                if parse(block.source):  # else the string is no string
                    end = block.end
            enclosing.append((indent, nested or _is_header(line)))
        index = end
    return Extracted(tuple(functions), tuple(imports))


def _read(block: _Block) -> tuple[list[Function], list[Import]]:
    """What a block holds: a function, or imports, or nothing."""
    source = block.source
    tree = parse(source)
    if tree is not None and tree.body:
        node = tree.body[0]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return [_parsed(node, source.split("\n"))], []
        imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        return [], [_import(n) for n in imports]
    head = _DEF.match(block.lines[block.header - block.start])
    if head is None:
        return [], []
    return [Function(head[1], source, bool(_RETURN.search(block.code)), None)], []


def _is_header(line: str) -> bool:
    """Whether a line opens a block of code; prose that ends with a colon does not."""
    if not _HEADER.match(line):
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

    def __init__(self, lines: list[str], start: int, strings: bool = True) -> None:
        self.start, self.header, self.end = start, -1, start
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
        self.header = max(self.header, start)
        if quote and strings:
            self.__init__(lines, start, strings=False)  # type: ignore[misc]
            return
        self.lines, self.code = lines[start : self.end], "\n".join(code)

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
