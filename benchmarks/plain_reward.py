"""Rewards of plain functions, for the peer's side of benchmarks; nothing else uses them.

``reward`` is the aux/main reward as plain scripts compute it, in-process ``exec`` with an alarm, on
code of the embedded model only: it is neither exact nor safe. ``noise`` costs nothing.
"""

from __future__ import annotations

import ast
import contextlib
import signal
import zlib
from collections.abc import Iterator, Sequence
from typing import Any


def reward(texts: Sequence[str], item: dict[str, Any], timeout: float = 1.0) -> float:
    """Return the reward, at most 4.0 for (aux, main), 2.1 for (main,)."""
    aux, main = (texts[0], texts[-1]) if len(texts) > 1 else (None, texts[-1])
    total = 0.4 * (aux is not None and _defines(aux, "aux"))
    if not _defines(main, item["entry_point"]):
        return total
    total += 0.6
    program = f"{aux or ''}\n{main}\n"
    try:
        tree = ast.parse(main)
        compile(program, "program", "exec")
    except (SyntaxError, ValueError):
        return total
    total += 0.5
    check = ast.parse(item["test"]).body[-1]
    tests = [ast.unparse(statement) for statement in check.body]  # type: ignore[attr-defined]
    passed = 0
    signal.signal(signal.SIGALRM, _alarm)
    namespace: dict[str, Any] = {}
    with contextlib.suppress(BaseException):
        with _limited(timeout):
            exec(program, namespace)
        namespace["candidate"] = namespace[item["entry_point"]]
        for test in tests:
            with contextlib.suppress(BaseException), _limited(timeout):
                exec(test, namespace)
                passed += 1
    total += passed / len(tests)
    if not passed or aux is None:
        return total
    calls = any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "aux"
        for n in ast.walk(tree)
    )
    if calls:
        body = next(n for n in tree.body if isinstance(n, ast.FunctionDef)).body
        wrapper = len(body) == 1 and isinstance(body[0], ast.Return)
        total += 0.5 + (0.0 if wrapper else 1.0)
    return total


def noise(texts: Sequence[str], item: Any = None) -> float:
    """Return 0 to 1, by a hash of the texts.

    A random model's completions then earn different rewards; otherwise there is no advantage and no
    update to measure.
    """
    return zlib.crc32("\0".join(texts).encode()) / 2**32


def _defines(text: str, name: str) -> bool:
    return f"def {name}(" in text and "return" in text


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _alarm(*_: Any) -> None:
    raise TimeoutError
