"""Objects that Python code passes instead of names: rows, templates, functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from comlrl.config.plugins.modules import Source
from comlrl.config.plugins.targets import FROM_PYTHON, Target
from comlrl.errors import UserError
from comlrl.tasks.prompts import PREFILL, REVISION, STYLE, SYSTEM
from comlrl.types import Domain, JointAction, Reward, Score, Task

FIELD = re.compile(r"(?<!\{)\{(\w+)")  # a name in braces in a template
Rows = Iterable[Mapping[str, Any] | str]  # also a datasets.Dataset


class FunctionReward(Reward):
    """A reward computed by a function of a task and the agents' answers by role."""

    function: Callable[[Task, Mapping[str, str]], float | Score] | None = None
    roles: tuple[str, ...] = ()

    def score(self, actions: Any) -> list[Any]:
        return [self._score(action) for action in actions]

    def _score(self, action: JointAction) -> Any:
        if self.function is None:
            raise UserError("reward: missing, and the program asks for it; pass reward=")
        return self.function(action.task, dict(zip(self.roles, action.completions_N, strict=True)))


class TemplateDomain(Domain):
    """A domain whose agents each have a prompt template, filled in from the columns of a row."""

    reward = FunctionReward

    def __init__(self, templates: Mapping[str, str], columns: Iterable[str] | None) -> None:
        """Set the templates. ``columns``: the rows' columns; None: unknown until they are
        loaded."""
        named = [name for text in templates.values() for name in FIELD.findall(text)]
        self.by_role = dict(templates)
        self.fields = tuple(dict.fromkeys(named if columns is None else columns))
        self.needed = [name for name in dict.fromkeys(named) if name in self.fields]

    def task(self, name: str, row: Mapping[str, Any]) -> Task:
        for field in self.needed:
            if row.get(field) is None:
                raise ValueError(f"no value of `{field}`, which an agent's template names")
        return Task(name, dict(row))

    def roles(self, num_agents: int) -> tuple[str, ...]:
        if num_agents != len(self.by_role):
            raise ValueError(f"there are templates for {', '.join(self.by_role)}")
        return tuple(self.by_role)

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return tuple(self.by_role.values())

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        held = {name: task.fields.get(name) for name in self.fields}
        texts = {name: "" if value is None else str(value) for name, value in held.items()}
        return (texts,) * num_agents

    def problem(self, task: Task) -> str:
        return "\n".join(str(task.fields[name]) for name in self.needed) or task.task_id


def task_splits(tasks: Any) -> dict[str, Any]:
    """Return rows by split: a mapping's splits, or all rows as ``train``. Raises UserError."""
    splits = tasks if isinstance(tasks, Mapping) else {"train": tasks}
    return {name: _rows(rows) for name, rows in splits.items()}


def _rows(tasks: Any) -> Any:
    if hasattr(tasks, "column_names"):  # a datasets.Dataset
        rows: Any = tasks
    elif not isinstance(tasks, Iterable) or isinstance(tasks, str | bytes):
        raise UserError(f"tasks: {tasks!r}; pass rows, texts or a datasets.Dataset")
    else:
        rows = [{"prompt": row} if isinstance(row, str) else row for row in tasks]
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"tasks: row {index} is {row!r:.80}; pass a mapping or a text")
    if not len(rows):
        raise UserError("tasks: there are none; pass at least one row")
    return rows


def columns_of(splits: Mapping[str, Any]) -> list[str]:
    """Return the names of all columns that occur in any row."""
    listed = [
        rows.column_names if hasattr(rows, "column_names") else [n for row in rows for n in row]
        for rows in splits.values()
    ]
    return list(dict.fromkeys(name for names in listed for name in names))


def check_roles(agents: Mapping[str, str]) -> None:
    """Raise UserError for roles that cannot be keys of ``prompts``, and for empty templates."""
    if not isinstance(agents, Mapping) or not agents:
        raise UserError(f"agents: {agents!r}; pass a mapping from each role to its template")
    for role, template in agents.items():
        if not (isinstance(role, str) and role.isidentifier()):
            raise UserError(f"agents: {role!r}; use roles of letters, digits and underscores")
        if role in (SYSTEM, REVISION, PREFILL, STYLE):
            raise UserError(f"agents.{role}: the name of another prompt; rename the role")
        if not isinstance(template, str):
            raise UserError(f"agents.{role}: {template!r}; pass the template as a text")


def rows_target(splits: Mapping[str, Any]) -> Target:
    """Return rows as the value of ``dataset.name``, with a digest like that of a file."""
    content = "".join(
        f"{name}: {getattr(rows, '_fingerprint', None) or repr(rows)}"
        for name, rows in splits.items()
    ).encode()
    source = Source(name="tasks", file=Path(FROM_PYTHON), content=content, beside=False)
    return Target("dataset.name", FROM_PYTHON, splits, (source,))


def reward_target(reward: Any) -> Target:
    """Return a function or a ``Reward`` class as the value of ``reward.target``."""
    made = reward
    if not isinstance(reward, type):
        if not callable(reward):
            raise UserError(f"reward: {reward!r}; pass a function of (task, answers), or a class")
        try:
            inspect.signature(reward).bind("task", "answers")
        except TypeError as error:
            raise UserError(f"reward: it is not called as reward(task, answers): {error}") from None
        except ValueError:  # a built-in has no signature
            pass
        made = type("reward", (FunctionReward,), {"function": staticmethod(reward)})
    return Target("reward.target", FROM_PYTHON, made, sources_of("reward", reward))


def sources_of(key: str, passed: Any) -> tuple[Source, ...]:
    """Return the source text of a function or class; a resumed run compares its digest."""
    try:
        file, text = inspect.getsourcefile(passed), inspect.getsource(passed)
    except (OSError, TypeError):  # typed into an interpreter, or not Python
        return ()
    return (Source(name=key, file=Path(file or key), content=text.encode(), beside=False),)
