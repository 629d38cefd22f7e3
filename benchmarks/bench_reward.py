"""Programs scored per second in the sandbox, against plain `exec` in one process with an alarm.

    python benchmarks/bench_reward.py [--rounds 5] [--isolation auto] [--steps 12] [--loops 1000]
        [--data HumanEval.jsonl]

The programs are HumanEval's canonical solutions; every round changes a constant in each, so that
no outcome is remembered. The plain side does for each program what the published implementation
does, and no more: extract the function, check the syntax, `exec` the program, parse the tests, and
`exec` each under an alarm; one process, no isolation. Rounds alternate, so that both meet the same
neighbours on the machine. Four heavy solutions (HumanEval 75 takes longer than a hundred others)
dominate both sides; without them the sandbox's own cost is seen.

Before that, CPU time of all processes for one small program of five tests, for 1, 2 and 4 workers;
and the reward's share of the seconds of a MAGRPO quickstart step.

With --loops, a batch of programs that loop forever is timed against timeouts · count / workers.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import human_eval

from comlrl.rewards.code.joint_program import contribution, join, preamble
from comlrl.rewards.code.reward import CodeReward
from comlrl.run_files import METRICS
from comlrl.types import JointAction, Task

ROOT = Path(__file__).parents[1]
HEAVY = {"HumanEval/75", "HumanEval/147", "HumanEval/32", "HumanEval/36"}
VARIANTS = count()
WARM = 2  # first steps of a run, which start workers and compile, are left out
ENDLESS = "def loop(x):\n    while True:\n        x += {number}\n    return x\n"


def made(entry_point: str, tests: str) -> Task:
    """Return a task without text; ``tests`` call the function ``f``."""
    fields = {"prompt": "", "test": f"def check(f):\n{tests}", "entry_point": entry_point}
    return Task(entry_point, fields)


def vary(task: Task, text: str, number: int) -> str:
    """Return the program with one more default argument: other code, same behaviour."""
    tree = ast.parse(text)
    function = next(n for n in tree.body if getattr(n, "name", "") == task.fields["entry_point"])
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
        name = task.fields["entry_point"]
        part = contribution(text, name, (name,))
        program = join(preamble(task.fields["prompt"], name), [part])
        ast.parse(program)
        names: dict = {}
        random.seed(0)
        exec(program, names)
        names["candidate"] = names[name]
        functions = [
            n for n in ast.parse(task.fields["test"]).body if isinstance(n, ast.FunctionDef)
        ]
        passed, tests = 0, next(f.body for f in functions if f.name == "check")
        for statement in tests:
            signal.alarm(10)
            try:
                exec(compile(ast.Module([statement], []), "test", "exec"), names)
                passed += 1
            except Exception as error:
                print(task.task_id, type(error).__name__, file=sys.stderr)
            signal.alarm(0)
        shares.append(passed / len(tests))
    return shares


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cost(isolation: str, programs: int = 1000) -> None:
    """Print milliseconds of CPU for one program: judge, fork, program and its end."""
    task = made("f", "    assert f(3) == 9\n" * 5)

    def used(count: int, workers: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with CodeReward(workers, isolation=isolation) as reward:
            texts = [f"def f(x):\n    return x * x + {n} - {n}\n" for n in range(count)]
            reward.score([JointAction(task, (text,)) for text in texts])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    for workers in (1, 2, 4):
        spent = used(programs + 10, workers) - used(10, workers)
        print(f"{workers} workers: {1000 * spent / programs:.2f} ms of CPU a program")


def share_of_a_step(steps: int, isolation: str) -> None:
    """Print the reward's share of a quickstart step: the median, minimum and maximum."""
    from comlrl.trainers.launch.commands import train as execution
    from comlrl.trainers.magrpo import MAGRPOTrainer

    spent: list[float] = []  # seconds in ``score``, which a step of one turn calls once

    def build(run: Any) -> MAGRPOTrainer:
        score = run.reward.score

        def timed(actions: Any) -> Any:
            start = time.perf_counter()
            scores = score(actions)
            spent.append(time.perf_counter() - start)
            return scores

        run.reward.score = timed
        return MAGRPOTrainer(run.section, run.team, run.rollout, run.loop, run.sampling)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        overrides = [f"output.dir={folder}/run", f"sandbox.isolation={isolation}"]
        overrides += [f"magrpo.max_steps={WARM + steps}", "magrpo.eval_interval=0"]
        config = str(ROOT / "configs" / "magrpo_quickstart.yaml")
        if execution.main("magrpo", build, ["--config", config, "--override", *overrides]):
            raise SystemExit("the quickstart did not run; its output stands above")
        lines = (Path(folder) / "run" / METRICS).read_text().splitlines()
    took = [json.loads(line)["metrics"]["step_seconds"] for line in lines]
    pairs = list(zip(spent, took, strict=True))[WARM:]
    shares = [100 * reward / step for reward, step in pairs]
    reward, step = map(statistics.median, zip(*pairs, strict=True))
    print(f"quickstart, {steps} steps, medians: the reward takes {reward:.2f} of {step:.2f} s,")
    print(f"{statistics.median(shares):.1f} % of a step ({min(shares):.1f} to {max(shares):.1f} %)")


def compare(pairs: list[tuple[Task, str]], rounds: int, isolation: str) -> None:
    with CodeReward(isolation=isolation) as reward:
        print(f"{os.cpu_count()} cores, {reward.workers} workers, isolation: {reward.isolation}")
        measure("all", pairs, rounds, reward)
        light = [pair for pair in pairs if pair[0].task_id not in HEAVY]
        measure("without the heavy ones", light, rounds, reward)


def measure(name: str, pairs: list[tuple[Task, str]], rounds: int, reward: CodeReward) -> None:
    """Print medians over rounds; a first round starts the workers and compiles the tests."""
    tasks = [task for task, _ in pairs]
    plain, isolated = [], []
    for number in range(rounds + 1):
        variant = next(VARIANTS)
        texts = [vary(task, text, variant) for task, text in pairs]
        actions = [JointAction(task, (text,)) for task, text in zip(tasks, texts, strict=True)]
        plain.append(len(tasks) / seconds(partial(run_plainly, tasks, texts)))
        isolated.append(len(tasks) / seconds(partial(reward.score, actions)))
        assert all(abs(score.value - 2.1) < 1e-9 for score in reward.score(actions))
        if not number:
            plain, isolated = [], []
    ratio = statistics.median(there / here for here, there in zip(plain, isolated, strict=True))
    print(f"{len(tasks)} programs, {name}: {rounds} rounds, medians, programs/s")
    print(f"  plain exec, one process  {statistics.median(plain):8.0f}")
    print(f"  sandbox                  {statistics.median(isolated):8.0f}")
    print(f"  ratio                    {ratio:8.2f}")


def loop_forever(number: int, timeout: float, isolation: str) -> None:
    task = made("loop", "    assert f(1) == 1\n" * 7)
    texts = [ENDLESS.format(number=n) for n in range(number)]
    with CodeReward(timeout=timeout, isolation=isolation) as reward:
        reward.score([JointAction(task, ("def loop(x):\n    return x\n",))])
        took = seconds(lambda: reward.score([JointAction(task, (text,)) for text in texts]))
        workers = reward.workers
    bound = 3 * timeout * number / workers
    print(f"{number} endless loops, 3 timeouts of {timeout} s each over {workers} workers:")
    print(f"{took:.1f} s; timeouts · count / workers = {bound:.1f} s; ratio {took / bound:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--steps", type=int, default=12, help="of the quickstart; 0: none")
    parser.add_argument("--loops", type=int, default=0, help="how many endless programs; 0: none")
    parser.add_argument("--timeout", type=float, default=0.1, help="seconds, for --loops")
    human_eval.add_option(parser)
    options = parser.parse_args()
    pairs = [(task, human_eval.solution(task)) for task in human_eval.tasks(options.data)]
    cost(options.isolation)
    if options.steps:
        share_of_a_step(options.steps, options.isolation)
    compare(pairs, options.rounds, options.isolation)
    if options.loops:
        loop_forever(options.loops, options.timeout, options.isolation)


if __name__ == "__main__":
    main()
