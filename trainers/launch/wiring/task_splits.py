"""Training and evaluation tasks, filtered by whether they fit the models' context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from comlrl.config.resolved import CommonConfig
from comlrl.config.sections import DatasetConfig
from comlrl.errors import UserError, notice
from comlrl.trainers.launch.wiring.resolved_work import Work

if TYPE_CHECKING:
    from comlrl.types import Domain, Message, Sampling, Shape, Task


def load_both_splits(
    data: DatasetConfig, section: CommonConfig, domain: Domain
) -> tuple[list[Task], list[Task]]:
    """Load the training tasks and the first ``eval_num_samples`` evaluation tasks."""
    from comlrl.tasks.datasets import apart, load_tasks

    train = load_tasks(data, data.train_split, domain)
    if not section.eval_interval:
        return train, []
    held_out = load_tasks(data, data.eval_split, domain)[: section.eval_num_samples]
    held_out, shared = apart(held_out, train)
    if shared:
        notice(
            f"dataset.eval_split: {len(shared)} of the {len(held_out)} evaluation tasks of "
            f"'{data.eval_split}' are also training tasks of '{data.train_split}', e.g. "
            f"'{shared[0]}'; their rewards are not those of held-out tasks"
        )
    return train, held_out


def fitting(
    tasks: list[Task],
    work: Work,
    data: DatasetConfig,
    encode: Callable[[int, Sequence[Message]], Sequence[int]],
    length: int,
    sampling: Sampling,
) -> list[Task]:
    """Return the tasks whose first prompts leave room for a completion. A program's prompts are
    not checked, as they are known only during play.

    ``encode``: (agent, prompt) → tokens. ``length``: the limit of prompt and completion together.

    Raises UserError, naming the row, if a prompt is too long, unless ``on_bad_row: skip``.
    """
    if work.program is not None:
        return tasks
    fitting_tasks, prompts, agents = [], work.prompts, len(work.roles)
    for task in tasks:
        lengths = [
            (len(encode(i, read)), sampling.for_agent(i).max_new_tokens)
            for i, read in enumerate(prompts.first_N(task, agents))
            if i not in prompts.services
        ]
        read, written = max(lengths, key=sum)
        room = length - written
        if read <= room:
            fitting_tasks.append(task)
            continue
        problem = f"dataset row '{task.task_id}' has a prompt of {read} tokens, with room for "
        problem += f"{room} (context {length}, max_new_tokens {written})"
        if data.on_bad_row == "error":
            raise UserError(
                f"dataset.name: {problem}; raise agent_model.max_length if the model allows it, or "
                "set dataset.on_bad_row=skip"
            )
        notice(f"{problem}: skipped")
    if not fitting_tasks:
        raise UserError(
            f"dataset.name: no row of '{data.name}' fits the model's context of {length} tokens"
        )
    return fitting_tasks


def token_bound(
    work: Work,
    encode: Callable[[int, Sequence[Message]], Sequence[int]],
    shape: Shape,
    sampling: Sampling,
) -> Callable[[Task], int] | None:
    """Return a function that bounds the tokens of a task's first turn: its prompts and completions
    of full length. None for programs, whose prompts are known only during play.

    ``encode``: as in ``fitting``.
    """
    agents = [i for i in range(len(work.roles)) if i not in work.prompts.services]
    written = sum(shape.generations(i) * sampling.for_agent(i).max_new_tokens for i in agents)

    def bound(task: Task) -> int:
        prompts_N = work.prompts.first_N(task, len(work.roles))
        return written + sum(len(encode(i, prompts_N[i])) for i in agents)

    return bound if work.program is None else None
