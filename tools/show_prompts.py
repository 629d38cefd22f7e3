"""Prints what the agents read, in every external mode, for a task and given completions.

    python tools/show_prompts.py --data ../shared/data/HumanEval.jsonl --task HumanEval/0 \
        --completions aux.py main.py

Each ``--completions`` is one turn: a file for each agent, helpers first and main last; "-" stands
for an empty completion. The attempts are scored by the reward, and the prompts of every turn are
printed, the one after the last attempt included. ``--mode expert_edits`` asks the expert.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import external
from comlrl.config.sections import ExternalConfig
from comlrl.tasks.history import Exchange, next_prompt
from comlrl.tasks.prompts import Prompts, plain_text
from comlrl.types import Attempt, JointAction, Message, Task
from rewards.code.domain import CODE
from rewards.code.reward import CodeReward

MODES = (*CODE.modes(), *external.GENERAL)
COOPMINI = Path(__file__).parents[1] / "comlrl" / "builtin" / "coopmini" / "eval.jsonl"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=COOPMINI, help="rows as .jsonl")
    parser.add_argument("--task", default="0", help="a row's task_id, or its index")
    parser.add_argument(
        "--completions", type=Path, nargs="+", action="append", required=True, metavar="FILE"
    )
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES[:-1])
    parser.add_argument("--sandbox-slice", default="1", help="a whole number or all")
    parser.add_argument("--history", choices=("full", "last"), default="full")
    parser.add_argument("--original-prompt", action="store_true")
    parser.add_argument("--no-previous-response", action="store_true")
    parser.add_argument("--expert-model", default=ExternalConfig.expert_model)
    parser.add_argument("--expert-base-url")
    options = parser.parse_args(arguments)
    if len({len(files) for files in options.completions}) > 1:
        parser.error("--completions: every turn needs one file for each agent")
    return options


def section(options: argparse.Namespace, mode: str) -> ExternalConfig:
    """The ``external`` section that the options stand for."""
    n = options.sandbox_slice
    return ExternalConfig(
        mode=mode,
        sandbox_slice=int(n) if n.lstrip("+-").isdigit() else n,
        expert_model=options.expert_model,
        expert_base_url=options.expert_base_url,
        history=options.history,
        original_prompt=options.original_prompt,
        previous_response=not options.no_previous_response,
    )


def find_task(data: Path, wanted: str) -> Task:
    """The row with this task_id or index; raises ValueError where there is none."""
    rows = [json.loads(line) for line in data.read_text().splitlines() if line.strip()]
    for index, row in enumerate(rows):
        if wanted in (str(index), row.get("task_id")):
            return CODE.task(row.get("task_id", str(index)), row)
    raise ValueError(f"--task: {wanted!r} is not among the {len(rows)} rows of {data}")


def attempts_of(task: Task, turns: Sequence[Sequence[Path]]) -> list[Attempt]:
    """Each turn's completions, scored."""
    texts = [
        tuple("" if str(file) == "-" else file.read_text() for file in files) for files in turns
    ]
    with CodeReward(workers=1) as reward:
        scores = reward.score([JointAction(task, completions) for completions in texts])
    return [
        Attempt(task, completions, score, turn)
        for turn, (completions, score) in enumerate(zip(texts, scores, strict=True), 1)
    ]


def prompts_by_turn(
    attempts: Sequence[Attempt], settings: ExternalConfig
) -> list[tuple[tuple[Message, ...], ...]]:
    """Each agent's prompt at turn 1, and at the turn after each attempt."""
    prompts = Prompts(CODE)
    first = prompts.first(attempts[0].task, len(attempts[0].completions_N))
    told_T = [first, *external.build(settings, prompts)(attempts)]
    prompts_T: list[tuple[tuple[Message, ...], ...]] = [
        tuple((Message("user", text),) for text in first)
    ]
    for turn in range(1, len(told_T)):
        prompts_T.append(
            tuple(
                next_prompt(
                    [Exchange(told_T[t][i], attempts[t].completions_N[i]) for t in range(turn)],
                    told_T[turn][i],
                    history=settings.history,
                    original_prompt=settings.original_prompt,
                    previous_response=settings.previous_response,
                )
                for i in range(len(first))
            )
        )
    return prompts_T


def show(mode: str, task: Task, prompts_T: Sequence[Sequence[Sequence[Message]]]) -> None:
    for turn, prompts_N in enumerate(prompts_T, 1):
        names = CODE.parts(task, len(prompts_N))
        for name, prompt in zip(names, prompts_N, strict=True):
            roles = ", ".join(message.role for message in prompt)
            print(f"════ {mode} · turn {turn} · {name} ({roles})\n{plain_text(prompt)}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        attempts = attempts_of(find_task(options.data, options.task), options.completions)
        for attempt in attempts:
            print(f"════ reward of turn {attempt.turn}: {attempt.score.value:.2f}")
        for mode in options.mode:
            show(mode, attempts[0].task, prompts_by_turn(attempts, section(options, mode)))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
