"""``fake_vllm.py`` as a program: python -m tests.support.vllm_server PORT FILE

Appends its process id to FILE. It repeats itself: the same tokens for the same request.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from tests.support.vllm_runs import fake_server

if __name__ == "__main__":
    fake_server(int(sys.argv[1])).repeats = True
    with Path(sys.argv[2]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    threading.Event().wait()
