"""Task → what each agent reads at turn 1, and what every feedback ends with.

The words are the domain's templates, or those that the configuration gives in their place. Later
turns put an external mode's feedback behind the agent's own history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comlrl.config.plugins.targets import near
from comlrl.errors import UserError
from comlrl.types import Attempt, Domain, Message, Task

SYSTEM, REVISION = "system", "revision"  # keys of ``prompts`` beside the roles


class Prompts:
    """A domain's prompts, with the user's own in their places.

    Args:
        domain: whose templates, fields and values they are.
        own: templates by role, ``system`` (a message before everything, as it stands) and
            ``revision``, in the place of the domain's.
    """

    def __init__(self, domain: Domain, own: Mapping[str, str] | None = None) -> None:
        self.domain, self.own = domain, dict(own or {})

    @property
    def opening(self) -> tuple[Message, ...]:
        """What stands before every conversation."""
        text = self.own.get(SYSTEM)
        return () if text is None else (Message("system", text),)

    def first(self, task: Task, num_agents: int) -> tuple[str, ...]:
        """What each of N agents reads at turn 1."""
        roles = self.domain.roles(num_agents)
        templates = self.domain.templates(num_agents)
        return tuple(
            self.own.get(role, template).format_map(values)
            for role, template, values in zip(
                roles, templates, self.domain.values(task, num_agents), strict=True
            )
        )

    def texts(self, task: Task, num_agents: int) -> tuple[str, ...]:
        """All that each of N agents reads at turn 1, as one text."""
        before = [message.content for message in self.opening]
        return tuple("\n".join([*before, text]) for text in self.first(task, num_agents))

    def revision_N(self, attempt: Attempt) -> tuple[str, ...]:
        """What the feedback to each agent on an attempt ends with."""
        template = self.own.get(REVISION, self.domain.revision)
        values = self.domain.values(attempt.task, len(attempt.completions_N))
        return tuple(map(template.format_map, values))

    def parts(self, attempt: Attempt) -> tuple[str, ...]:
        """What each agent wrote, by name."""
        return self.domain.parts(attempt.task, len(attempt.completions_N))


def check_templates(prompts: Prompts, roles: Sequence[str], num_agents: int) -> None:
    """Raises UserError for one of the user's templates that has no place, or that has a field
    which the domain does not give."""
    domain, keys = prompts.domain, (*roles, SYSTEM, REVISION)
    for key, template in prompts.own.items():
        if key not in keys:
            mend = near(key, keys, "there are {}")
            raise UserError(f"prompts.{key}: {_start(template)} is for nobody; {mend}")
    own = {f"prompts.{key}": text for key, text in prompts.own.items() if key != SYSTEM}
    templates = domain.templates(num_agents)
    for name, found in (("roles", roles), ("templates", templates)):
        if len(found) != num_agents or len(set(roles)) != len(roles):
            raise UserError(
                f"domain: its `{name}` for {num_agents} agents are {list(found)}; give one for "
                "each agent, and roles that differ"
            )
    given = zip(roles, templates, strict=True)
    theirs = {f"domain: its template for `{role}`": text for role, text in given}
    theirs["domain: its `revision`"] = domain.revision
    for key, template in (own | theirs).items():
        _check_fields(key, template, domain.fields)


def _check_fields(key: str, template: str, fields: Sequence[str]) -> None:
    try:
        template.format_map(dict.fromkeys(fields, ""))
    except KeyError as error:
        name = error.args[0]
        mend = near(str(name), fields, "there are {}")
        raise UserError(
            f"{key}: {_start(template)} has an unknown field {{{name}}}; {mend}"
        ) from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        known = ", ".join(f"{{{name}}}" for name in fields)
        raise UserError(
            f"{key}: {_start(template)} cannot be filled in: {error}; its fields are {known}, and "
            "braces that are meant are doubled"
        ) from error


def _start(template: str) -> str:
    line = " ".join(template.split())
    return repr(line if len(line) <= 40 else f"{line[:37]}...")


def plain_text(prompt: Sequence[Message]) -> str:
    """A conversation as plain text, for models without a chat template."""
    return "\n".join(message.content.rstrip("\n") + "\n" for message in prompt)
