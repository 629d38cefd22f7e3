"""Settings that have no effect in a configuration.

Each key declares the conditions with its default (``key(…, unused_if=…)``); conditions shared by
several keys are defined here, and ``without_effect`` finds the settings to report. Contradictory
settings are refused instead, by the sections' ``problems``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from comlrl.config.keys import Section, Unused, keys_of

# Conditions are called with the key's section and the whole configuration.
SINGLE_TURN = Unused(
    "nothing follows a single turn",
    lambda _, c: c.online.num_turns == 1 and not c.program.replaces_turns,
)
BY_PROGRAM = Unused("the program says who acts when", lambda _, c: c.program.replaces_turns)
ALONE = Unused("there is one agent", lambda s, _: s.num_agents == 1)
NO_EVALUATIONS = Unused(
    "eval_interval=0: nothing is evaluated", lambda _, c: c.online.eval_interval == 0
)
CANDIDATES = Unused(
    "it learns from preference_num_candidates joint candidates of a task",
    lambda s, _: not s.trained_online,
)
CANCELS = Unused(
    "with one joint action handed on, the future is the same for all siblings and cancels; "
    "handoff_width above 1 credits futures",
    lambda s, _: (
        s.handoff is not None
        and s.handoff_width == 1
        and s.turn_order == "simultaneous"
        and s.baseline in ("mean", "rloo", "max")
    ),
)


def sampled_apart(name: str) -> Unused:
    """Return the condition that ``sampling`` sets this key for every agent."""

    def everywhere(_: Any, config: Any) -> bool:
        values = [getattr(role, name) for role in config.role_sampling.values()]
        return len(values) == config.section.num_agents and None not in values

    return Unused(f"`sampling` sets {name} for every agent", everywhere)


def overridden(name: str) -> tuple[Unused, ...]:
    """Return the conditions under which no agent uses agent_model's value of this key."""
    taken = Unused(
        f"the algorithm's {name} is used",
        lambda _, c: getattr(c.section, name) is not None,
    )
    return taken, sampled_apart(name)


def without_effect(
    config: Any,
    sections: Mapping[str, Section],
    set_keys: Collection[str],
    unread: Mapping[str, str],
) -> list[str]:
    """Return one line for each reason, with the settings to which it applies.

    Args:
        sections: all sections that the run uses, by name.
        set_keys: the dotted keys that a file, a flag or an override has set. Keys set to their
            default are not reported.
        unread: dotted keys and sections that the run does not use → the reason.
    """
    reasons: dict[str, list[str]] = {}
    for name, section in sections.items():
        for key in keys_of(type(section)).values():
            dotted, value = f"{name}.{key.name}", getattr(section, key.name)
            if dotted not in set_keys or value == key.default:
                continue
            section_reason = unread.get(name) or unread.get(dotted)
            conditions = (*section.unused_if, *key.unused_if)
            reason = section_reason or next(
                (c.reason for c in conditions if c.when(section, config)), None
            )
            if reason is not None:
                reasons.setdefault(reason, []).append(f"{dotted}={value}")
    return [
        f"{', '.join(settings)} {'has' if len(settings) == 1 else 'have'} no effect: {reason}"
        for reason, settings in reasons.items()
    ]
