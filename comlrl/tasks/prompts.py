"""Composes each agent's prompt at turn 1, and the text at the end of every feedback.

Templates are the domain's unless the configuration replaces them. In later turns an external mode's
feedback follows the agent's history (``history.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from comlrl.errors import UserError, near
from comlrl.types import Attempt, Domain, Message, Task

# keys of ``prompts`` in addition to the roles
SYSTEM, REVISION, PREFILL, STYLE = "system", "revision", "prefill", "style"


class Prompts:
    """A domain's prompts, whose templates the user may replace.

    Args:
        domain: the domain whose templates, fields and values are used.
        templates: the user's templates by role, ``system`` (a first message, used verbatim),
            ``revision`` and ``prefill``; ``style`` selects the domain's wording that they replace.
        chats_N: whether each agent's model has a chat template; empty: none has.
        thinks_N: whether each agent's chat template opens a thinking block, after which the
            domain's ``prefill`` is left out; empty: none does.
        services: agents played by API services, which get no prefill because they cannot continue
            a text.

    Raises UserError for a style that the domain does not define.
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
        """Return the domain in the wording for this agent's model."""
        chats = agent < len(self.chats_N) and self.chats_N[agent]
        return self.domain.for_chat() if chats else self.domain

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages at the start of every conversation."""
        text = self.templates.get(SYSTEM)
        return () if text is None else (Message("system", text, verbatim=True),)

    def first(self, task: Task, num_agents: int) -> tuple[str, ...]:
        """Return the user message of each of N agents at turn 1."""
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
        """Return an agent's complete prompt: the opening, ``prompt`` and any prefill."""
        prefill = self.prefill(task, agent, num_agents)
        # A prefill with fields contains text of the task, which is not trusted.
        verbatim = prefill == self.templates.get(PREFILL)
        answer = (Message("assistant", prefill, verbatim),) if prefill else ()
        return (*self.opening, *prompt, *answer)

    def first_N(self, task: Task, num_agents: int) -> tuple[tuple[Message, ...], ...]:
        """Return the complete prompt of each of N agents at turn 1, without other agents' texts."""
        return tuple(
            self.full_prompt((Message("user", text),), task, agent, num_agents)
            for agent, text in enumerate(self.first(task, num_agents))
        )

    def texts(self, task: Task, num_agents: int) -> tuple[str, ...]:
        """Return the opening and the user message of each of N agents at turn 1 as one text."""
        before = [message.content for message in self.opening]
        return tuple("\n".join([*before, text]) for text in self.first(task, num_agents))

    def revision_N(self, attempt: Attempt) -> tuple[str, ...]:
        """Return the text that ends each agent's feedback on an attempt."""
        values_N = self.domain.values(attempt.task, len(attempt.completions_N))
        return tuple(
            self.templates.get(REVISION, self.worded(i).revision).format_map(values)
            for i, values in enumerate(values_N)
        )

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        """Return the text after an agent's prompt that shows earlier agents' texts of the turn."""
        return self.worded(agent).handed_on(task, agent, num_agents, written)

    def prefill(self, task: Task, agent: int, num_agents: int) -> str:
        """Return the text that an agent's answers start with, or "" for none; its prompt ends with
        it."""
        if agent in self.services:
            return ""
        thinks = agent < len(self.thinks_N) and self.thinks_N[agent]
        template = self.templates.get(PREFILL, "" if thinks else self.worded(agent).prefill)
        return template.format_map(self.domain.values(task, num_agents)[agent]) if template else ""

    def parts(self, attempt: Attempt) -> tuple[str, ...]:
        """Return the name of the part that each agent wrote."""
        return self.domain.parts(attempt.task, len(attempt.completions_N))


def check_templates(prompts: Prompts, roles: Sequence[str], num_agents: int) -> None:
    """Check the user's templates and the domain's.

    Raises UserError for a template of no agent or with an unknown field, and if there is not one
    role and one template for each agent.
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

    The model continues an assistant message at its end.
    """
    messages, prefill = split_prefill(prompt)
    text = "\n".join(message.content.rstrip("\n") + "\n" for message in messages)
    return f"{text}\n{prefill}" if prefill and text else text + prefill


def split_prefill(prompt: Sequence[Message]) -> tuple[tuple[Message, ...], str]:
    """Split off a final assistant message, which the answer continues; "" if there is none."""
    if prompt and prompt[-1].role == "assistant":
        return tuple(prompt[:-1]), prompt[-1].content
    return tuple(prompt), ""
