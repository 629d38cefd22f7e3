"""The reward of a configuration, for programs that cannot import this project.

    python benchmarks/reward_worker.py CONFIG [KEY=VALUE …]

Reads JSON lines {"task": index in dataset.train_split, "completions": [[a text of each agent], …]}
from standard input, and answers each with a line of rewards. Texts are treated as this project's
own: begun with the prefill, and ended by a stop string.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comlrl.config.resolved import Config
from comlrl.trainers.launch.checks.at_hand import agents_at_hand
from comlrl.trainers.launch.commands import command_line
from comlrl.trainers.launch.wiring.resolved_work import Work
from comlrl.trainers.launch.wiring.task_splits import load_both_splits
from comlrl.types import JointAction


def resolve(file: str, overrides: Sequence[str]) -> tuple[Config, Work]:
    """Return a configuration of MAGRPO, and its work with prompts for the models that it names."""
    arguments = command_line.parse_arguments("magrpo", ["--config", file, "--override", *overrides])
    config, work, _ = command_line.resolve("magrpo", arguments)
    return config, work.read_by([agent.encoder for agent in agents_at_hand(config, [])])


def main() -> None:
    config, work = resolve(sys.argv[1], sys.argv[2:])
    tasks, stop = (
        load_both_splits(config.dataset, config.section, work.domain)[0],
        config.agent_model.stop,
    )
    agents = len(work.roles)
    reward = work.build_reward()
    try:
        for line in sys.stdin:
            job = json.loads(line)
            task = tasks[job["task"]]
            begun_N = [work.prompts.prefill(task, agent, agents) for agent in range(agents)]
            actions = [
                JointAction(task, tuple(map(str.__add__, begun_N, (ended(t, stop) for t in texts))))
                for texts in job["completions"]
            ]
            print(json.dumps([score.value for score in reward.score(actions)]), flush=True)
    finally:
        reward.close()


def ended(text: str, stop: Sequence[str]) -> str:
    """Return the text up to the end of the first stop string."""
    return text[: min((text.index(s) + len(s) for s in stop if s in text), default=len(text))]


if __name__ == "__main__":
    main()
