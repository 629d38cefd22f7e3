"""Episodes of a program, played side by side, against their calls as one batch, and in six.

    python benchmarks/bench_programs.py [--rounds 7] [--tokens 48] [--config FILE --override K=V …]

25 tasks with 8 episodes each, in which two agents are called 6 times in turn. Every call's prompt
is known beforehand, so that the sampler can also be given all 1,200 calls at once, with the same
keys; the policies stay as they are, and both give the same completions up to rounding. The third
is what no program can be below, as its calls read each other: the same waves, one batch after the
other. The three are timed in turn, and each round's ratio counts. The program's time is that of its
waves and of all that plays it.
Beside other processes, read the ratio of CPU seconds, with OMP_NUM_THREADS=1: threads that wait
for each other use CPU time too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from comlrl.config.plugins.targets import Target  # noqa: E402
from comlrl.models.pretrained import build_team  # noqa: E402
from comlrl.programs.program import Program  # noqa: E402
from comlrl.programs.rollout import ProgramRollout  # noqa: E402
from comlrl.types import Request, Sampling, Shape  # noqa: E402
from trainers.launch.commands import command_line  # noqa: E402
from trainers.launch.wiring.assembly import build_sampler  # noqa: E402
from trainers.launch.wiring.task_splits import load_both_splits  # noqa: E402

TASKS, EPISODES, CALLS = 25, 8, 6


async def play(task: Any, agents: Any) -> float:
    prompts = list(agents.prompts.values())
    for call in range(CALLS):
        await list(agents.values())[call % 2](f"{prompts[call % 2]}# {call // 2}\n")
    return 0.0


class Recording:
    """A sampler that keeps what it was asked."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.encode, self.fits = sampler, sampler.encode, sampler.fits
        self.waves: list[Sequence[Sequence[Request]]] = []

    def sample(self, requests_N: Sequence[Sequence[Request]], sampling: Sampling) -> Any:
        self.waves.append(requests_N)
        return self.sampler.sample(requests_N, sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default=str(ROOT / "configs" / "magrpo_quickstart.yaml"))
    parser.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=7, help="after a first one that warms up")
    parser.add_argument("--tokens", type=int, default=48, help="of a call, at most")
    arguments = parser.parse_args()
    rounds, sampling = arguments.rounds, Sampling(1.0, arguments.tokens, top_p=0.95)
    given = ["--config", arguments.config, "--override", *arguments.override]
    config, work, _ = command_line.resolve("magrpo", command_line.parse_arguments("magrpo", given))
    _, sampler = build_sampler(config, build_team(config, reference=False, device="cpu"))
    program = Program(target=Target("program.target", "bench:play", play, ()), names_N=work.roles)
    tasks, shape = load_both_splits(config, work.domain)[0][:TASKS], Shape(2, 1, EPISODES)
    recording = Recording(sampler)

    reward = work.build_reward()  # the program does not ask for it

    def played(through: Any, number: int) -> Any:
        rollout = ProgramRollout(program, through, reward, work.prompts, seed=number)
        return rollout.grow(tasks, shape, sampling, ("train", 1))

    ways = ("episodes", "one batch", "six batches")
    ratios: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        recording.waves.clear()
        groups = played(recording, number)  # to know the calls
        whole = [
            [r for wave in recording.waves for r in wave[agent]] for agent in range(len(work.roles))
        ]
        waves = list(recording.waves)
        took: dict[str, tuple[float, float]] = {}
        for way in (ways, ways[::-1])[number % 2]:  # which goes first alternates
            began, cpu_began = time.perf_counter(), time.process_time()
            if way == "episodes":
                played(sampler, number)
            elif way == "one batch":
                sampled_N = sampler.sample(whole, sampling)
            else:
                for wave in waves:
                    sampler.sample(wave, sampling)
            took[way] = time.perf_counter() - began, time.process_time() - cpu_began
        tokens = sum(group.tokens for group in groups)
        calls = sum(len(own) for own_N in sampled_N for own in own_N)
        of_batch = sum(len(c.token_ids) for own_N in sampled_N for own in own_N for c in own)
        assert calls == TASKS * EPISODES * CALLS
        seconds = ", ".join(
            f"{way} {took[way][0]:.2f} s (CPU {took[way][1]:.2f} s)" for way in ways
        )
        print(
            f"{len(waves)} waves, {calls} calls, {tokens} tokens ({of_batch} in the batch): "
            f"{seconds}",
            flush=True,
        )
        if number:  # the first warms up
            for way in ways[1:]:
                for index, name in enumerate(("seconds", "CPU seconds")):
                    ratio = took["episodes"][index] / took[way][index]
                    ratios.setdefault(f"{name}, to {way}", []).append(ratio)
    for name, found in ratios.items():
        median = statistics.median(found)
        print(f"{name}: median {median:.3f}, {min(found):.3f} to {max(found):.3f}")


if __name__ == "__main__":
    main()
