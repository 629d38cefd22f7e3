"""Task → what each agent reads at turn 1, and what every feedback ends with.

The words are the domain's templates, or those that the configuration gives in their place. Later
turns put an external mode's feedback after the agent's own history.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from comlrl.errors import UserError, near
from comlrl.types import Attempt, Domain, Message, Task

# keys of ``prompts`` beside the roles
SYSTEM, REVISION, PREFILL, STYLE = "system", "revision", "prefill", "style"


class Prompts:
    """A domain's prompts, with the user's templates in place of the domain's.

    Args:
        domain: the domain whose templates, fields and values are used.
        templates: the user's, by role, ``system`` (a message before everything, verbatim),
            ``revision`` and ``prefill``; ``style`` names the domain's wording that they replace.
        chats_N: whether each agent's model has a chat template; empty: none has.
        thinks_N: whether each agent's prompts end within a thought that the template opens, where
            the domain's ``prefill`` is left out; empty: no agent's do.
        services: the agents that services play, which continue no text: they get no prefill.

    Raises UserError for a style that the domain does not have.
    """

    def __init__(
        self,
        domain: Domain,
        templates: Mapping[str, str] | None = None,
        chats_N: Sequence[bool] = (),
        thinks_N: Sequence[bool] = (),
        services: Collection[int] = (),
    ) -> None:
        self.templates, self.chats_N = dict(templates or {}), tuple(chats_N)
        self.thinks_N, self.services = tuple(thinks_N), frozenset(services)
        style = self.templates.pop(STYLE, "usual")
        styles = {"usual": domain, **domain.styles()}
        if style not in styles:
            raise UserError(f"prompts.style: '{style}'; use {' or '.join(styles)}")
        self.domain = styles[style]

    def worded(self, agent: int) -> Domain:
        """Return the domain, worded for this agent's model."""
        chats = agent < len(self.chats_N) and self.chats_N[agent]
        return self.domain.for_chat() if chats else self.domain

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages before every conversation."""
        text = self.templates.get(SYSTEM)
        return () if text is None else (Message("system", text, verbatim=True),)

    def first(self, task: Task, num_agents: int) -> tuple[str, ...]:
        """Return what each of N agents reads at turn 1."""
        roles = self.domain.roles(num_agents)
        templates_N = [self.worded(i).templates(num_agents)[i] for i in range(num_agents)]
        return tuple(
            self.templates.get(role, template).format_map(values)
            for role, template, values in zip(
                roles, templates_N, self.domain.values(task, num_agents), strict=True
            )
        )

    def full_prompt(
        self, prompt: Sequence[Message], task: Task, agent: int, num_agents: int
    ) -> tuple[Message, ...]:
        """Return all that an agent reads: the opening, its prompt, and any prefill."""
        prefill = self.prefill(task, agent, num_agents)
        # One with fields holds text of the task.
        verbatim = prefill == self.templates.get(PREFILL)
        answer = (Message("assistant", prefill, verbatim),) if prefill else ()
        return (*self.opening, *prompt, *answer)

    def first_N(self, task: Task, num_agents: int) -> tuple[tuple[Message, ...], ...]:
        """Return all that each of N agents reads at turn 1 before any agent has written."""
        return tuple(
            self.full_prompt((Message("user", text),), task, agent, num_agents)
            for agent, text in enumerate(self.first(task, num_agents))
        )

    def texts(self, task: Task, num_agents: int) -> tuple[str, ...]:
        """Return all that each of N agents reads at turn 1, as one text."""
        before = [message.content for message in self.opening]
        return tuple("\n".join([*before, text]) for text in self.first(task, num_agents))

    def revision_N(self, attempt: Attempt) -> tuple[str, ...]:
        """Return the end of each agent's feedback on an attempt."""
        values_N = self.domain.values(attempt.task, len(attempt.completions_N))
        return tuple(
            self.templates.get(REVISION, self.worded(i).revision).format_map(values)
            for i, values in enumerate(values_N)
        )

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        """Return the text of earlier agents in this turn that follows an agent's prompt."""
        return self.worded(agent).handed_on(task, agent, num_agents, written)

    def prefill(self, task: Task, agent: int, num_agents: int) -> str:
        """Return the start of each of an agent's answers: it reads this last and continues it."""
        if agent in self.services:
            return ""
        thinks = agent < len(self.thinks_N) and self.thinks_N[agent]
        template = self.templates.get(PREFILL, "" if thinks else self.worded(agent).prefill)
        return template.format_map(self.domain.values(task, num_agents)[agent]) if template else ""

    def parts(self, attempt: Attempt) -> tuple[str, ...]:
        """Return what each agent wrote, by name."""
        return self.domain.parts(attempt.task, len(attempt.completions_N))


def check_templates(prompts: Prompts, roles: Sequence[str], num_agents: int) -> None:
    """Check the user's templates.

    Raises UserError for one without a place, or with a field that the domain does not have.
    """
    domain, keys = prompts.domain, (*roles, SYSTEM, REVISION, PREFILL)
    for key, template in prompts.templates.items():
        if key not in keys:
            hint = near(key, keys, "there are {}")
            raise UserError(f"prompts.{key}: {_start(template)} is for no agent; {hint}")
    with_fields = {
        f"prompts.{key}": text for key, text in prompts.templates.items() if key != SYSTEM
    }
    for key, template in with_fields.items():
        _check_fields(key, template, domain.fields)
    for worded in (domain, domain.for_chat()):
        templates = worded.templates(num_agents)
        for name, names in (("roles", roles), ("templates", templates)):
            if len(names) != num_agents or len(set(roles)) != len(roles):
                raise UserError(
                    f"domain: its `{name}` for {num_agents} agents are {list(names)}; return one "
                    "for each agent, and roles that differ"
                )
        for role, template in zip(roles, templates, strict=True):
            _check_fields(f"domain: its template for `{role}`", template, domain.fields)
        _check_fields("domain: its `revision`", worded.revision, domain.fields)
        _check_fields("domain: its `prefill`", worded.prefill, domain.fields)


def _check_fields(key: str, template: str, fields: Sequence[str]) -> None:
    try:
        template.format_map(dict.fromkeys(fields, ""))
    except KeyError as error:
        name = error.args[0]
        hint = near(str(name), fields, "there are {}")
        raise UserError(
            f"{key}: {_start(template)} contains an unknown field {{{name}}}; {hint}"
        ) from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        placeholders = ", ".join(f"{{{name}}}" for name in fields)
        raise UserError(
            f"{key}: {_start(template)} cannot be filled in: {error}; its fields are "
            f"{placeholders}, and literal braces are doubled"
        ) from error


def _start(template: str) -> str:
    line = " ".join(template.split())
    return repr(line if len(line) <= 40 else f"{line[:37]}...")


def plain_text(prompt: Sequence[Message]) -> str:
    """Return a conversation as plain text, for models without a chat template.

    An assistant's message at its end is continued.
    """
    messages, prefill = split_prefill(prompt)
    text = "\n".join(message.content.rstrip("\n") + "\n" for message in messages)
    return f"{text}\n{prefill}" if prefill and text else text + prefill


def split_prefill(prompt: Sequence[Message]) -> tuple[tuple[Message, ...], str]:
    """Split a prompt from the final assistant's message, which the answer continues; "": none."""
    if prompt and prompt[-1].role == "assistant":
        return tuple(prompt[:-1]), prompt[-1].content
    return tuple(prompt), ""
