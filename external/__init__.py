"""External modes: what the agents are told about an attempt before they try again.

``build`` turns the ``external`` section into a ``comlrl.types.Transition``, which gives one text
for each agent, helpers first and main last. How a text is put behind an agent's own history is
``comlrl.tasks.history``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from external.diagnosis import ExternalError, checked_slice

if TYPE_CHECKING:
    from comlrl.config.sections import ExternalConfig
    from comlrl.types import Transition
    from external.expert_edits import Fallbacks

MODES = ("level_feedback", "level_passed", "passed", "plain", "expert_edits")


def build(external: ExternalConfig, fallbacks: Fallbacks | None = None) -> Transition:
    """The transition of ``external.mode``; raises ExternalError for a wrong setting.

    ``fallbacks`` counts the attempts that were answered in an expert's place.
    """
    slice_ = checked_slice(external.sandbox_slice)
    match external.mode:
        case "level_feedback":
            from external.level_feedback import LevelFeedback

            return LevelFeedback(slice_)
        case "level_passed":
            from external.level_passed import LevelPassed

            return LevelPassed(slice_)
        case "passed":
            from external.passed import Passed

            return Passed(slice_)
        case "plain":
            return build_plain(external)
        case "expert_edits":
            from external.expert_edits import ExpertEdits

            return ExpertEdits(
                model=external.expert_model,
                base_url=external.expert_base_url,
                on_error=external.on_error,
                plain=build_plain(external),
                fallbacks=fallbacks,
            )
    raise ExternalError(f"external.mode: {external.mode!r} is not a mode; use one of {MODES}")


def build_plain(external: ExternalConfig) -> Transition:
    """``plain``, restating the attempt only where the history does not show it."""
    from external.plain import Plain

    return Plain(restate=external.history == "last" and not external.previous_response)
