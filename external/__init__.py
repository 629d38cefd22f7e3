"""External modes: the feedback on an attempt that the agents read before they try again.

``find`` looks up the mode that the ``external`` section names; its ``build`` makes the
``comlrl.types.Transition``, which returns one text per agent. ``comlrl.tasks.history`` appends each
text to its agent's history.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl.config.plugins.arguments import keywords
from comlrl.config.plugins.targets import Target, check_class, load
from comlrl.config.sections import ExternalConfig
from comlrl.errors import UserError, near
from comlrl.external.plain import Plain
from comlrl.rollout.checked import CheckedTransition
from comlrl.types import Domain, Transition

if TYPE_CHECKING:
    from comlrl.external.expert_edits import Fallbacks
    from comlrl.tasks.prompts import Prompts

EXPERT = "expert_edits"
GENERAL = ("plain", EXPERT)  # modes for every domain
OF_EXPERT = ("expert_model", "expert_base_url", "on_error")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """An external mode that has been loaded and checked."""

    name: str
    settings: ExternalConfig
    cls: Callable[..., Transition]  # for ``expert_edits``, the fallback
    target: Target | None  # where a custom class comes from; None for a builtin one
    keys_read: frozenset[str]  # settings that the mode uses

    @property
    def facts_read(self) -> type | None:
        """The type of ``Score.facts`` that the mode reads (its attribute ``reads``), or None."""
        return getattr(self.cls, "reads", None)

    def build(self, prompts: Prompts, fallbacks: Fallbacks | None = None) -> Transition:
        """Return the transition. ``fallbacks`` counts the attempts that the fallback answered.

        Raises UserError for an invalid setting.
        """
        arguments = _arguments_of(self.cls, self.settings, prompts)
        if self.name == EXPERT:
            from comlrl.external.expert_edits import ExpertEdits

            return ExpertEdits(
                prompts,
                model=self.settings.expert_model,
                base_url=self.settings.expert_base_url,
                on_error=self.settings.on_error,
                plain=Plain(**arguments),
                fallbacks=fallbacks,
            )
        if self.target is None:
            return self.cls(**arguments)
        with self.target.calling():
            made = self.cls(**arguments)
        return CheckedTransition(made, self.target)


def find(
    settings: ExternalConfig,
    domain: Domain,
    folder: Path = Path(),
    domain_target: Target | None = None,
) -> Mode:
    """Return the mode that ``external.mode`` names; if null, the domain's first mode or ``plain``.

    Args:
        folder: the folder of the YAML file, in which a custom mode is looked up.
        domain_target: the target of a custom domain, which may define modes.

    Raises UserError for an unknown mode or one that cannot be built.
    """
    modes, target = domain.modes(), None
    name = settings.mode or next(iter(modes), "plain")
    cls: Callable[..., Transition] = Plain
    if ":" in name:
        target = load("external.mode", name, folder)
        check_class(target, Transition, ["__call__"])
        cls = target.obj
    elif name in modes and name != EXPERT:
        cls = modes[name]
        target = domain_target and dataclasses.replace(domain_target, key="external.mode")
    elif name not in GENERAL:
        hint = near(name, (*modes, *GENERAL), "there are {}")
        raise UserError(f"external.mode: {name!r} is not a mode; {hint}")
    keys = {*_arguments_of(cls, settings, None), *(OF_EXPERT if name == EXPERT else ())}
    return Mode(name=name, settings=settings, cls=cls, target=target, keys_read=frozenset(keys))


def _arguments_of(
    cls: Callable[..., Any], settings: ExternalConfig, prompts: Prompts | None
) -> dict[str, Any]:
    """Return the settings that a mode's constructor accepts, by parameter name."""
    offered = {f.name: getattr(settings, f.name) for f in fields(settings)} | {"prompts": prompts}
    return keywords(cls, "external.mode", {}, offered, "external")
