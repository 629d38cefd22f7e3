"""Keeps the memory that a run has freed."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_KEPT, _GREATEST = 1 << 30, 32 << 20  # bytes; glibc takes no larger threshold for its own mappings


def keep_freed() -> None:
    """Keep freed memory: glibc would return large blocks and take fresh pages for the next ones
    at every step."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        mallopt(_MMAP_THRESHOLD, _GREATEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
