"""The weights of earlier rounds' pairs in a round's training."""

from __future__ import annotations


def replay_weights(kind: str, index: int, rounds: int | None, decay: float) -> dict[int, float]:
    """Return a mapping from earlier rounds to the weight of their pairs in round ``index``.

    The current round's weight is 1. ``current``: no earlier rounds. ``last_k``: the last ``rounds``
    with weight 1. ``all``: all with weight 1. ``lambda_decay``: the last ``rounds`` (None: all)
    with weight decay^a, where a is the round's age.
    """
    if kind == "current":
        return {}
    first = 0 if kind == "all" or rounds is None else max(0, index - rounds)
    base = decay if kind == "lambda_decay" else 1.0
    return {earlier: base ** (index - earlier) for earlier in range(first, index)}
