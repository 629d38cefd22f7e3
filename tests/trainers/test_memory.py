"""Memory that was freed is taken again without a call of the system for each page."""

from __future__ import annotations

import platform

import pytest

from tests.support.processes import python

PROGRAM = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages of one size
from comlrl.trainers.launch.wiring.allocator import keep_freed
if {kept}:
    keep_freed()
for size in [20, *[16, 24] * 20]:  # MB; the first makes place
    blocks = [b"x" * (size << 20) for _ in range(2)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def faults(kept: bool) -> int:
    return int(python("-c", PROGRAM.format(kept=kept)).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept():
    # Twenty times 16 and 24 MB twice over are 1,600 MB: 409,600 pages of 4 KiB, if each is new.
    with_it, without = faults(True), faults(False)
    assert without > with_it + 200_000
