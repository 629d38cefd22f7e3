"""Which earlier rounds' pairs are learned from again, and how much each counts."""

from __future__ import annotations


def replay_weights(kind: str, index: int, rounds: int | None, decay: float) -> dict[int, float]:
    """Return earlier round → weight of its pairs in round ``index``; the present one's is 1.

    ``current``: none. ``last_k``: the last ``rounds`` before this one, and ``all`` of them, at 1.
    ``lambda_decay``: a pair of age a (rounds ago) at decay^a, of at most ``rounds`` (None: all).
    """
    if kind == "current":
        return {}
    first = 0 if kind == "all" or rounds is None else max(0, index - rounds)
    base = decay if kind == "lambda_decay" else 1.0
    return {earlier: base ** (index - earlier) for earlier in range(first, index)}
