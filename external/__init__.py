"""External modes: what the agents are told about an attempt before they try again.

``build`` turns the ``external`` section into a ``comlrl.types.Transition``, which gives one text
for each agent. How a text is put behind an agent's own history is ``comlrl.tasks.history``'s.
"""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import TYPE_CHECKING, Any

from comlrl.config.sections import ConfigError
from external.plain import Plain

if TYPE_CHECKING:
    from comlrl.config.sections import ExternalConfig
    from comlrl.tasks.prompts import Prompts
    from comlrl.types import Transition
    from external.expert_edits import Fallbacks

GENERAL = ("plain", "expert_edits")  # modes for every domain


def default_mode(prompts: Prompts) -> str:
    """What ``external.mode: null`` means: the first of the domain's own, or ``plain``."""
    return next(iter(prompts.domain.modes()), "plain")


def check_mode(external: ExternalConfig, prompts: Prompts) -> str:
    """``external.mode`` by name; raises ConfigError for one that is not known."""
    known = (*prompts.domain.modes(), *GENERAL)
    mode = external.mode or default_mode(prompts)
    if mode not in known:
        raise ConfigError(f"external.mode: {mode!r} is not a mode; use one of {', '.join(known)}")
    return mode


def build(
    external: ExternalConfig, prompts: Prompts, fallbacks: Fallbacks | None = None
) -> Transition:
    """The transition of ``external.mode``; raises ConfigError for a wrong setting.

    ``fallbacks`` counts the attempts that were answered in an expert's place.
    """
    mode = check_mode(external, prompts)
    if mode == "expert_edits":
        from external.expert_edits import ExpertEdits

        return ExpertEdits(
            prompts,
            model=external.expert_model,
            base_url=external.expert_base_url,
            on_error=external.on_error,
            plain=_made(Plain, external, prompts),
            fallbacks=fallbacks,
        )
    return _made(prompts.domain.modes().get(mode, Plain), external, prompts)


def _made(mode: Any, external: ExternalConfig, prompts: Prompts) -> Transition:
    """A mode, made with what its parameters name."""
    offered = {f.name: getattr(external, f.name) for f in fields(external)} | {"prompts": prompts}
    return mode(**{name: offered[name] for name in signature(mode).parameters if name in offered})
