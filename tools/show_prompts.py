"""Prints what the agents of a configuration read: its own domain, prompts and external mode.

    python tools/show_prompts.py --config configs/magrpo_quickstart.yaml
    python tools/show_prompts.py --override dataset.name=rows.jsonl \
        --task HumanEval/0 --completions aux.py main.py --mode level_feedback plain

Each ``--completions`` is one turn: a file for each agent, in the agents' order; "-" stands for an
empty completion. The attempts are scored by the reward, and the prompts of every turn are printed,
the one after the last attempt included. Mode ``expert_edits`` asks the expert. Where agents act in
order (``turn_order``), each is shown reading those before it; of the last turn that is not known.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.config.resolved import Config
from comlrl.tasks.datasets import load_tasks
from comlrl.tasks.history import Exchange, behind, next_prompt
from comlrl.tasks.prompts import Prompts, plain_text
from comlrl.tasks.quoting import clean
from comlrl.types import Attempt, JointAction, Message, Task
from trainers.launch.commands import evaluation_plan
from trainers.launch.wiring.work import build_reward, build_transition, load_prompts, with_mode

UNKNOWN = "(here stands what those before it will have written in this turn)\n"
QUICKSTART = Path(__file__).parents[1] / "configs" / "magrpo_quickstart.yaml"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", default=str(QUICKSTART), metavar="FILE")
    add("--override", nargs="*", action="extend", default=[], metavar="KEY=VALUE")
    add("--task", default="0", help="a row of dataset.eval_split: its task_id, or its index")
    add("--completions", type=Path, nargs="+", action="append", default=[], metavar="FILE")
    add("--mode", nargs="+", help="external modes; left out: the configuration's")
    options = parser.parse_args(arguments)
    if len({len(files) for files in options.completions}) > 1:
        parser.error("--completions: every turn needs one file for each agent")
    return options


def resolve(options: argparse.Namespace) -> Config:
    """The configuration, with as many agents as there are completions."""
    given = ["--config", options.config, "--override", *options.override]
    if options.completions:
        given += ["--num-agents", str(len(options.completions[0]))]
    return evaluation_plan.make_plan(evaluation_plan.parse_arguments(given)).config


def find_task(tasks: Sequence[Task], wanted: str) -> Task:
    """The task of this name or index; raises ValueError where there is none."""
    for index, task in enumerate(tasks):
        if wanted in (str(index), task.task_id):
            return task
    raise ValueError(f"--task: {wanted!r} is not among the {len(tasks)} rows of the split")


def attempts_of(config: Config, task: Task, turns: Sequence[Sequence[Path]]) -> list[Attempt]:
    """Each turn's completions, scored."""
    if not turns:
        return []
    texts = [
        tuple("" if str(file) == "-" else file.read_text() for file in files) for files in turns
    ]
    reward = build_reward(config)
    try:
        scores = reward.score([JointAction(task, completions) for completions in texts])
    finally:
        reward.close()
    return [
        Attempt(task, completions, score, turn)
        for turn, (completions, score) in enumerate(zip(texts, scores, strict=True), 1)
    ]


def prompts_by_turn(
    config: Config, prompts: Prompts, task: Task, attempts: Sequence[Attempt]
) -> list[tuple[tuple[Message, ...], ...]]:
    """Each agent's prompt at turn 1, and at the turn after each attempt."""
    first, settings = prompts.first(task, config.section.num_agents), config.external
    told_T = [first, *(build_transition(config, prompts)(attempts) if attempts else ())]
    written_T = [*(attempt.completions_N for attempt in attempts), None]
    shown_T = [_handed_on(config, prompts, task, written) for written in written_T]
    turns_T = [
        tuple(
            (Message("user", behind(text, shown)),)
            for text, shown in zip(first, shown_T[0], strict=True)
        )
    ]
    for turn in range(1, len(told_T)):
        turns_T.append(
            tuple(
                next_prompt(
                    [
                        Exchange(told_T[t][i], attempts[t].completions_N[i], shown_T[t][i])
                        for t in range(turn)
                    ],
                    behind(told_T[turn][i], shown_T[turn][i]),
                    history=settings.history,
                    original_prompt=settings.original_prompt,
                    previous_response=settings.previous_response,
                )
                for i in range(len(first))
            )
        )
    return [tuple((*prompts.opening, *p) for p in prompts_N) for prompts_N in turns_T]


def _handed_on(
    config: Config, prompts: Prompts, task: Task, written: Sequence[str] | None
) -> tuple[str, ...]:
    """What each agent reads of those before it in a turn; ``written`` None: not known yet."""
    agents = config.section.num_agents
    if config.section.turn_order == "simultaneous":
        return ("",) * agents
    if written is None:
        return ("", *[UNKNOWN] * (agents - 1))
    texts = [clean(text) for text in written]
    handed_on = prompts.domain.handed_on
    return ("", *(handed_on(task, i, agents, texts[:i]) for i in range(1, agents)))


def show(mode: str, names: Sequence[str], prompts_T: Sequence[Sequence[Sequence[Message]]]) -> None:
    for turn, prompts_N in enumerate(prompts_T, 1):
        for name, prompt in zip(names, prompts_N, strict=True):
            roles = ", ".join(message.role for message in prompt)
            print(f"════ {mode} · turn {turn} · {name} ({roles})\n{plain_text(prompt)}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        config = resolve(options)
        prompts, agents = load_prompts(config), config.section.num_agents
        tasks = load_tasks(config.dataset, config.dataset.eval_split, prompts.domain)
        task = find_task(tasks, options.task)
        attempts = attempts_of(config, task, options.completions)
        for attempt in attempts:
            print(f"════ reward of turn {attempt.turn}: {attempt.score.value:.2f}")
        for mode in options.mode or [None]:
            external = dataclasses.replace(config.external, mode=mode or config.external.mode)
            moded = dataclasses.replace(config, external=external)
            shown = str(with_mode(moded, prompts).mode)
            names = prompts.domain.parts(task, agents)
            show(shown, names, prompts_by_turn(moded, prompts, task, attempts))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
