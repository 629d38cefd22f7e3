"""Allocator settings that let a process reuse freed memory."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt
_KEPT, _GREATEST = 1 << 30, 32 << 20  # bytes; the latter is glibc's largest mmap threshold


def keep_freed() -> None:
    """Keep freed memory in the process: by default glibc returns large blocks to the system and
    maps fresh pages at every step."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries lack it
        mallopt(_MMAP_THRESHOLD, _GREATEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
