"""Runs on machines that are not as they should be; called in processes of the zygote."""

from __future__ import annotations

import os
import time
from itertools import count

NOBODY = 65534


def jumping_clock(algorithm: str, argv: list[str]) -> int:
    """The wall clock goes back an hour, then on a day, every time that it is looked at."""
    calls, real = count(), time.time
    time.time = lambda: real() + (-3600 if next(calls) % 2 else 86400)  # type: ignore[assignment]
    return _run(algorithm, argv)


def without_rights(algorithm: str, argv: list[str]) -> int:
    """As a user to whom nothing belongs, where the tests are root's."""
    import tests.support.runs  # noqa: F401  (what is imported later must be readable)
    from comlrl.loop import resume  # noqa: F401

    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return _run(algorithm, argv)


def _run(algorithm: str, argv: list[str]) -> int:
    from tests.support.zygote import run

    return run(algorithm, argv)
