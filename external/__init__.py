"""External modes: the feedback on an attempt that the agents read before they try again.

``build`` turns the ``external`` section into a ``comlrl.types.Transition``, which gives one text
for each agent. ``comlrl.tasks.history`` appends a text to an agent's history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl.config.plugins.arguments import keywords
from comlrl.config.plugins.targets import Target, check_class, load, near
from comlrl.config.sections import ExternalConfig
from comlrl.errors import UserError
from comlrl.rollout.checked import CheckedTransition
from comlrl.types import Transition
from external.plain import Plain

if TYPE_CHECKING:
    from comlrl.tasks.prompts import Prompts
    from external.expert_edits import Fallbacks

GENERAL = ("plain", "expert_edits")  # modes for every domain
OF_EXPERT = ("expert_model", "expert_base_url", "on_error")


def default_mode(prompts: Prompts) -> str:
    """What ``external.mode: null`` means: the first of the domain's own, or ``plain``."""
    return next(iter(prompts.domain.modes()), "plain")


def build(
    external: ExternalConfig,
    prompts: Prompts,
    fallbacks: Fallbacks | None = None,
    folder: Path = Path(),
) -> Transition:
    """The transition of ``external.mode``; raises UserError for a wrong setting.

    ``fallbacks`` counts the attempts that were answered in an expert's place. ``folder``: that of
    the YAML file, for a mode of the user's own.
    """
    mode = external.mode or default_mode(prompts)
    if mode == "expert_edits":
        from external.expert_edits import ExpertEdits

        return ExpertEdits(
            prompts,
            model=external.expert_model,
            base_url=external.expert_base_url,
            on_error=external.on_error,
            plain=Plain(**_given(Plain, external, prompts)),
            fallbacks=fallbacks,
        )
    cls, target = _found(mode, prompts, folder)
    given = _given(cls, external, prompts)
    if target is None:
        return cls(**given)
    with target.calling():
        made = cls(**given)
    return CheckedTransition(made, target)


def settings_read(external: ExternalConfig, prompts: Prompts, folder: Path) -> set[str]:
    """The keys of ``external`` that its mode is made with. Raises UserError for a mode that
    there is not, or that cannot be made."""
    mode = external.mode or default_mode(prompts)
    if mode == "expert_edits":
        return {*_given(Plain, external, prompts), *OF_EXPERT}
    cls, _ = _found(mode, prompts, folder)
    return set(_given(cls, external, prompts))


def facts_read(external: ExternalConfig, prompts: Prompts, folder: Path) -> type | None:
    """What the mode needs ``Score.facts`` to be, by its attribute ``reads``; None: nothing."""
    mode = external.mode or default_mode(prompts)
    if mode == "expert_edits":
        return None
    return getattr(_found(mode, prompts, folder)[0], "reads", None)


def _found(
    mode: str, prompts: Prompts, folder: Path
) -> tuple[Callable[..., Transition], Target | None]:
    """A mode's class, and whose it is, if it is the user's own."""
    if ":" in mode:
        target = load("external.mode", mode, folder)
        check_class(target, Transition, ["__call__"])
        return target.found, target
    own = prompts.domain.modes()
    if mode != "plain" and mode not in own:
        hint = near(mode, (*own, *GENERAL), "there are {}")
        raise UserError(f"external.mode: {mode!r} is not a mode; {hint}")
    return own.get(mode, Plain), None


def _given(cls: Callable[..., Any], external: ExternalConfig, prompts: Prompts) -> dict[str, Any]:
    """What a mode is made with: what its parameters name."""
    offered = {f.name: getattr(external, f.name) for f in fields(external)} | {"prompts": prompts}
    return keywords(cls, "external.mode", {}, offered, "external")
