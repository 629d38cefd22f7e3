"""First working version: one plain process a program. The sandbox proper replaces it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from comlrl.types import TestOutcome
from rewards.checks import split_check


@dataclass(frozen=True, slots=True)
class Job:
    code: bytes
    preamble: str
    test: str
    entry_point: str


RUN = """
import sys, json, marshal, signal
code, preamble, statements, entry, parameter, timeout = marshal.loads(sys.stdin.buffer.read())
program, tests, out = {"__name__": "program"}, {"__name__": "tests"}, []
signal.signal(signal.SIGALRM, lambda *_: 1/0)
exec(preamble, tests)
for source, is_test in statements:
    error = None
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        if entry not in program: exec(marshal.loads(code), program)
        tests[parameter] = tests["candidate"] = tests[entry] = program[entry]
        exec(source, tests)
    except BaseException as e: error = [type(e).__name__, str(e)[:200]]
    signal.setitimer(signal.ITIMER_REAL, 0)
    if is_test: out.append(error)
sys.__stdout__.write(json.dumps(out))
"""


class Pool:
    isolation = "none"

    def __init__(self, workers, timeout, memory_mb, isolation):
        self.workers, self.timeout = workers or os.cpu_count(), timeout

    def _run(self, job: Job) -> tuple[TestOutcome, ...]:
        check = split_check(job.test, job.entry_point)
        tests = [s.source for s in check.tests]
        statements = [(s.source, s.is_test) for s in check.statements]
        import marshal

        message = marshal.dumps(
            (job.code, job.preamble, statements, job.entry_point, check.parameter, self.timeout)
        )
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", RUN],
                input=message,
                capture_output=True,
                timeout=3 * self.timeout + 5,
            )
            errors = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            errors = [["Died", ""]] * len(tests)
        return tuple(
            TestOutcome(source, error is None, *(error or (None, None)))
            for source, error in zip(tests, errors, strict=True)
        )

    def run(self, jobs):
        with ThreadPoolExecutor(self.workers) as executor:
            return list(executor.map(self._run, jobs))

    def close(self):
        pass
