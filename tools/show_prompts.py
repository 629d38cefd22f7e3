r"""Print the prompts of a configuration's agents: its domain, prompts and external mode.

Prompts are printed as the model reads them, with its chat template and what that adds, such as a
system message. Each is headed by its agent's role, the key of ``prompts``.

    python tools/show_prompts.py --config configs/magrpo_quickstart.yaml
    python tools/show_prompts.py --override dataset.name=rows.jsonl \
        --task HumanEval/0 --completions aux.py main.py --mode level_feedback plain

Each ``--completions`` is one turn: a file for each agent, in the agents' order; "-" stands for an
empty completion. The attempts are scored by the reward, and the prompts of every turn are printed,
the one after the last attempt included. Mode ``expert_edits`` asks the expert. With sequential
turns (``turn_order``), an agent's prompt shows the texts of those before it, except in the last
turn, where they are not known.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl import external
from comlrl.config.resolved import CommonConfig, Config
from comlrl.config.sections import AgentModelConfig, ExternalConfig
from comlrl.errors import UserError, report
from comlrl.quoting import clean
from comlrl.tasks.datasets import load_tasks
from comlrl.tasks.history import Exchange, next_prompt, with_handed_on
from comlrl.tasks.prompts import Prompts
from comlrl.trainers.launch.checks.at_hand import agents_at_hand, prompt_forms
from comlrl.trainers.launch.commands import evaluation_plan
from comlrl.trainers.launch.wiring import hub
from comlrl.trainers.launch.wiring.resolved_work import Work
from comlrl.types import Attempt, JointAction, Message, Task

UNKNOWN = "(the texts of the agents before it in this turn come here)\n"
QUICKSTART = Path(__file__).parents[1] / "configs" / "magrpo_quickstart.yaml"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--config", default=str(QUICKSTART), metavar="FILE", help="YAML file; default: a quickstart"
    )
    add(
        "--override", nargs="*", action="extend", default=[], metavar="KEY=VALUE",
        help="dotted keys, e.g. prompts.system='Be brief.'",
    )  # fmt: skip
    add("--task", default="0", help="a row of dataset.eval_split: its task_id, or its index")
    add(
        "--completions", type=Path, nargs="+", action="append", default=[], metavar="FILE",
        help="an attempt: a file for each agent; repeat the option for further turns",
    )  # fmt: skip
    add("--mode", nargs="+", help="external modes; left out: the configuration's")
    options = parser.parse_args(arguments)
    if len({len(files) for files in options.completions}) > 1:
        parser.error("--completions: every turn needs one file for each agent")
    return options


def resolve(options: argparse.Namespace) -> tuple[Config, Work]:
    """Return the configuration, with one agent per completion, and its work."""
    arguments = ["--config", options.config, "--override", *options.override]
    if options.completions:
        arguments += ["--num-agents", str(len(options.completions[0]))]
    plan = evaluation_plan.make_plan(evaluation_plan.parse_arguments(arguments))
    agents = agents_at_hand(plan.config, [])
    return plan.config, plan.work.read_by([agent.encoder for agent in agents])


def find_task(tasks: Sequence[Task], wanted: str) -> Task:
    """Return the task of this name or index; raise UserError if there is none."""
    for index, task in enumerate(tasks):
        if wanted in (str(index), task.task_id):
            return task
    raise UserError(f"--task: {wanted!r} is not among the {len(tasks)} rows of the split")


def attempts_of(work: Work, task: Task, turns: Sequence[Sequence[Path]]) -> list[Attempt]:
    """Return each turn's scored completions."""
    if not turns:
        return []
    texts = [
        tuple("" if str(file) == "-" else file.read_text() for file in files) for files in turns
    ]
    reward = work.build_reward()
    try:
        scores = reward.score([JointAction(task, completions) for completions in texts])
    finally:
        reward.close()
    return [
        Attempt(task, completions, score, turn)
        for turn, (completions, score) in enumerate(zip(texts, scores, strict=True), 1)
    ]


def prompts_by_turn(
    section: CommonConfig,
    settings: ExternalConfig,
    work: Work,
    task: Task,
    attempts: Sequence[Attempt],
) -> list[tuple[tuple[Message, ...], ...]]:
    """Return each agent's prompt at turn 1, and at the turn after each attempt."""
    prompts = work.prompts
    first = prompts.first(task, len(work.roles))
    text_T = [first, *(work.mode.build(prompts)(attempts) if attempts else ())]
    written_T = [*(attempt.completions_N for attempt in attempts), None]
    shown_T = [_handed_on(section, prompts, task, written) for written in written_T]
    turns_T: list[tuple[tuple[Message, ...], ...]] = [
        tuple(
            (Message("user", with_handed_on(text, shown)),)
            for text, shown in zip(first, shown_T[0], strict=True)
        )
    ]
    for turn in range(1, len(text_T)):
        turns_T.append(
            tuple(
                next_prompt(
                    [
                        Exchange(text_T[t][i], attempts[t].completions_N[i], shown_T[t][i])
                        for t in range(turn)
                    ],
                    with_handed_on(text_T[turn][i], shown_T[turn][i]),
                    history=settings.history,
                    original_prompt=settings.original_prompt,
                    previous_response=settings.previous_response,
                )
                for i in range(len(first))
            )
        )
    return [
        tuple(
            prompts.full_prompt(prompt, task, i, len(first)) for i, prompt in enumerate(prompts_N)
        )
        for prompts_N in turns_T
    ]


def _handed_on(
    section: CommonConfig, prompts: Prompts, task: Task, written: Sequence[str] | None
) -> tuple[str, ...]:
    """Return what each agent reads of those before it in a turn; ``written`` None: unknown."""
    agents = section.num_agents
    if section.turn_order == "simultaneous":
        return ("",) * agents
    if written is None:
        return ("", *[UNKNOWN] * (agents - 1))
    texts = [clean(text) for text in written]
    return ("", *(prompts.handed_on(task, i, agents, texts[:i]) for i in range(1, agents)))


def _reader(
    section: AgentModelConfig, name: str, beside: Path
) -> Callable[[Sequence[Message]], str]:
    """Return a function from an agent's messages to its model's text; load no weights."""
    try:
        hub.check_reachable([("agent_model.name", name)], beside)
        from comlrl.models.pretrained import load_encoder

        encoder = load_encoder(section, name)
    except UserError as error:
        print(f"notice: shown without a chat template: {error}", file=sys.stderr)
        return _messages
    return lambda prompt: encoder.tokenizer.decode(
        encoder.encode(prompt), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _messages(prompt: Sequence[Message]) -> str:
    return "\n".join(f"[{message.role}]\n{message.content}" for message in prompt)


def show(
    mode: str,
    roles: Sequence[str],
    prompts_T: Sequence[Sequence[Sequence[Message]]],
    reader_N: Sequence[Callable[[Sequence[Message]], str]],
) -> None:
    for turn, prompts_N in enumerate(prompts_T, 1):
        for role, prompt, text in zip(roles, prompts_N, reader_N, strict=True):
            print(f"════ {mode} · turn {turn} · {role}\n{text(prompt)}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        config, work = resolve(options)
        hub.check_data(config.dataset.name, config.beside)
        tasks = load_tasks(config.dataset, config.dataset.eval_split, work.domain)
        task = find_task(tasks, options.task)
        attempts = attempts_of(work, task, options.completions)
        for attempt in attempts:
            print(f"════ reward of turn {attempt.turn}: {attempt.score.value:.2f}")
        names = config.agent_models
        readers = {n: _reader(config.agent_model, n, config.beside) for n in dict.fromkeys(names)}
        reader_N = [readers[name] for name in names]
        for line in prompt_forms(names, agents_at_hand(config, [])):
            print(f"notice: {line}", file=sys.stderr)
        for name in options.mode or [work.mode.name]:
            named = dataclasses.replace(config.external, mode=name)
            mode = external.find(named, work.domain, config.folder, work.domain_target)
            work = dataclasses.replace(work, mode=mode)
            shown = prompts_by_turn(config.section, config.external, work, task, attempts)
            show(name, work.roles, shown, reader_N)
    except (UserError, OSError) as error:
        report(error)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
