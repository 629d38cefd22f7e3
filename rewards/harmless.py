"""Which code can run in a process that other programs are run in afterwards.

Harmless code can compute, loop, recurse and raise, but has no way to anything that outlives its own
names: it makes no class, sets no attribute, and mentions no builtin, attribute or module beyond the
lists below, which lead only to plain values and to functions without lasting effects. What is not
on a list, new syntax included, is not harmless; such a program gets a process of its own. This
saves a fork. It is no wall: processes are confined the same whatever runs in them, and tests are
out of reach in both cases.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import math
import re
from collections.abc import Callable
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BUILTINS = _names(
    "abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter "
    "float format frozenset hash hex int isinstance issubclass iter len list map max min next oct "
    "ord pow print range repr reversed round set slice sorted str sum tuple zip True False None "
    "NotImplemented Ellipsis ArithmeticError AssertionError AttributeError Exception IndexError "
    "KeyError LookupError NameError NotImplementedError OverflowError RecursionError RuntimeError "
    "StopIteration TypeError UnboundLocalError UnicodeError ValueError ZeroDivisionError"
)
_OTHER_BUILTINS = frozenset(dir(builtins)) - _BUILTINS

# Module → what may be imported from it, or read as its attribute. Left out is whatever reads code
# or attribute names from text (Formatter, attrgetter, get_type_hints, namedtuple) and whatever sets
# attributes of its arguments (wraps).
_MODULES = {
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "collections": "Counter OrderedDict defaultdict deque",
    "copy": "copy deepcopy",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "itertools": " ".join(n for n in dir(itertools) if not n.startswith("_")),
    "math": " ".join(n for n in dir(math) if not n.startswith("_")),
    "re": "A ASCII DOTALL I IGNORECASE M MULTILINE S VERBOSE X compile escape findall finditer "
    "fullmatch match search split sub subn",
    "string": "ascii_letters ascii_lowercase ascii_uppercase capwords digits hexdigits octdigits "
    "printable punctuation whitespace",
    "typing": "Any Callable Deque Dict FrozenSet Generator Iterable Iterator List Literal Mapping "
    "Optional Sequence Set Tuple Union",
}
_MEMBERS = {name: _names(members) for name, members in _MODULES.items()}
_PLAIN = [bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice]
_PLAIN += [str, tuple, re.Match, re.Pattern]
_ATTRIBUTES = frozenset().union(
    *_MEMBERS.values(),
    *({name for name in dir(kind) if not name.startswith("_")} for kind in _PLAIN),
    _names(
        "appendleft args elements extendleft maxlen most_common move_to_end popleft rotate "
        "subtract total"
    ),
) - {"format", "format_map"}  # "{0.…}" reads any attribute


def _attribute(node: ast.Attribute) -> bool:
    return type(node.ctx) is ast.Load and node.attr in _ATTRIBUTES


def _import(node: ast.Import) -> bool:
    return all(alias.name in _MEMBERS for alias in node.names)


def _import_from(node: ast.ImportFrom) -> bool:
    known = _MEMBERS.get(node.module or "", frozenset())
    return not node.level and all(alias.name in known for alias in node.names)


def _name(node: ast.Name) -> bool:
    return node.id not in _OTHER_BUILTINS and not node.id.startswith("__")


def _try(node: ast.Try) -> bool:
    """A generator that is left suspended runs nothing when it is thrown away."""
    return not any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(node))


# Kinds of nodes, and what is looked at in some. Not here: classes, ``with`` and coroutines, which
# run code at ends of their own, and ``match``, which reads attributes by keyword.
_NODES: dict[type[ast.AST], Callable[[Any], bool] | None] = {
    getattr(ast, name): None
    for name in _names(
        "Module FunctionDef arguments arg Return Delete Assign AugAssign AnnAssign For While If "
        "Raise ExceptHandler Assert alias Global Nonlocal Expr Pass Break Continue BoolOp And Or "
        "NamedExpr BinOp Add Sub Mult MatMult Div Mod Pow LShift RShift BitOr BitXor BitAnd "
        "FloorDiv UnaryOp Invert Not UAdd USub Lambda IfExp Dict Set ListComp SetComp DictComp "
        "GeneratorExp comprehension Yield YieldFrom Compare Eq NotEq Lt LtE Gt GtE Is IsNot In "
        "NotIn Call keyword FormattedValue JoinedStr Constant Subscript Starred List Tuple Slice "
        "Load Store Del"
    )
}
_NODES |= {
    ast.Attribute: _attribute,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.Name: _name,
    ast.Try: _try,
}


def is_harmless(tree: ast.AST) -> bool:
    """Whether all of a syntax tree is harmless. Trees that are, are so together."""
    pending = [tree]
    while pending:
        node = pending.pop()
        kind = type(node)
        if kind not in _NODES:
            return False
        check = _NODES[kind]
        if check is not None and not check(node):
            return False
        for field in kind._fields:
            value = getattr(node, field, None)
            if isinstance(value, ast.AST):
                pending.append(value)
            elif isinstance(value, list):
                pending += [item for item in value if isinstance(item, ast.AST)]
    return True
