"""Programs scored per second in the sandbox, against plain `exec` in one process with an alarm.

    python benchmarks/bench_reward.py [--rounds 5] [--isolation auto] [--loops 1000]

The programs are HumanEval's canonical solutions; every round changes a constant in each, so that
no outcome is remembered. Both sides start from the agent's text: find the function, compile it,
run each test. The plain side is the least that the published implementation does: one process,
`exec`, an alarm for each test, no isolation. Rounds alternate, so that both meet the same
neighbours on the machine.

With --loops, a batch of programs that loop forever is timed against timeouts · count / workers.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.types import JointAction, Task
from rewards.analysis import contribution, join, preamble
from rewards.checks import split_check
from rewards.code_rewards import CodeReward

DATA = Path(__file__).parents[2] / "shared" / "data" / "HumanEval.jsonl"
ENDLESS = "def loop(x):\n    while True:\n        x += {number}\n    return x\n"


def load(path: Path) -> tuple[list[Task], list[str]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tasks = [Task(r["task_id"], r["prompt"], r["test"], r["entry_point"]) for r in rows]
    return tasks, [r["prompt"] + r["canonical_solution"] for r in rows]


def vary(task: Task, text: str, number: int) -> str:
    """The same program with one more default argument: other code, same behaviour."""
    tree = ast.parse(text)
    function = next(n for n in tree.body if getattr(n, "name", "") == task.entry_point)
    assert isinstance(function, ast.FunctionDef)
    function.args.kwonlyargs.append(ast.arg("variant"))
    function.args.kw_defaults.append(ast.Constant(number))
    return ast.unparse(tree)


def run_plainly(tasks: list[Task], texts: list[str]) -> list[float]:
    """Share of tests passed, in this process."""

    def expire(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, expire)
    shares = []
    for task, text in zip(tasks, texts, strict=True):
        part = contribution(text, task.entry_point, (task.entry_point,))
        names: dict = {}
        random.seed(0)
        exec(join(preamble(task.prompt, task.entry_point), [part]), names)
        names["candidate"] = names[task.entry_point]
        passed, tests = 0, 0
        for statement in split_check(task.test, task.entry_point).statements:
            signal.alarm(10)
            try:
                exec(statement.source, names)
                passed += statement.is_test
            except Exception as error:
                print(task.task_id, type(error).__name__, file=sys.stderr)
            signal.alarm(0)
            tests += statement.is_test
        shares.append(passed / tests)
    return shares


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(rounds: int, isolation: str) -> None:
    tasks, solutions = load(DATA)
    plain, isolated = [], []
    with CodeReward(isolation=isolation) as reward:
        for number in range(rounds + 1):
            texts = [vary(task, text, number) for task, text in zip(tasks, solutions, strict=True)]
            actions = [JointAction(task, (text,)) for task, text in zip(tasks, texts, strict=True)]
            here = seconds(lambda: run_plainly(tasks, texts))  # noqa: B023
            there = seconds(lambda: reward.score(actions))  # noqa: B023
            assert all(abs(s.value - 2.1) < 1e-9 for s in reward.score(actions))
            if number:  # the first round starts the workers and compiles the tests
                plain.append(len(tasks) / here)
                isolated.append(len(tasks) / there)
        level = reward.isolation
    ratios = [there / here for here, there in zip(plain, isolated, strict=True)]
    print(f"{len(tasks)} programs, {rounds} rounds, {os.cpu_count()} cores; medians")
    print(f"plain exec, one process     {statistics.median(plain):8.0f} programs/s")
    print(f"sandbox ({level:10s})        {statistics.median(isolated):8.0f} programs/s")
    print(f"ratio                       {statistics.median(ratios):8.2f}")


def loop_forever(count: int, timeout: float, isolation: str) -> None:
    task = Task("loop", "", "def check(f):\n" + "    assert f(1) == 1\n" * 7, "loop")
    texts = [ENDLESS.format(number=number) for number in range(count)]
    with CodeReward(timeout=timeout, isolation=isolation) as reward:
        reward.score([JointAction(task, ("def loop(x):\n    return x\n",))])
        took = seconds(lambda: reward.score([JointAction(task, (text,)) for text in texts]))
        workers = reward.workers
    bound = 3 * timeout * count / workers
    print(f"{count} endless loops, 3 timeouts of {timeout} s each over {workers} workers:")
    print(f"{took:.1f} s; timeouts · count / workers = {bound:.1f} s; ratio {took / bound:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--loops", type=int, default=0, help="how many endless programs; 0: none")
    parser.add_argument("--timeout", type=float, default=0.1, help="seconds, for --loops")
    options = parser.parse_args()
    if not DATA.exists():
        raise SystemExit(f"{DATA} is missing: the benchmark runs HumanEval's solutions")
    compare(options.rounds, options.isolation)
    if options.loops:
        loop_forever(options.loops, options.timeout, options.isolation)


if __name__ == "__main__":
    main()
