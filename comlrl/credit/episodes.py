"""A task's episodes → advantages of each agent's calls → token rows.

The return of agent i from its j-th call on, where it was paid r_m after m calls:

    R_ij = Σ_{m ≥ j} γ^(m − j) r_m + γ^max(0, n − j) r_final,   n = its calls in the episode

``discount`` γ counts the agent's own calls. The baseline of a j-th call is taken from the same
sums in all G episodes of the task, also in those where the agent has made fewer calls: there only
the final reward follows. Its effect on the expected gradient E[Â_ij ∇ log π] depends on its kind:

- ``rloo``, ``greedy``, ``raw``: unbiased. The other episodes, the greedy one and 0 do not depend
  on what the call chooses.
- ``mean``: (G − 1)/G times the unbiased gradient, since R_g − mean(R) = (G − 1)/G · (R_g − mean of
  the others).
- ``max``: biased. The maximum depends on the call's own return.
- ``advantage_normalization``: biased. The standard deviation depends on the call's own return.
"""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.credit.advantages import sibling_advantages
from comlrl.types import Call, Episode, EpisodeGroup, Row
from comlrl.types.token_rows import importances_of


def return_to_go(episode: Episode, agent: int, call: int, discount: float) -> float:
    """R_ij for the j-th call, from 1; ``call`` may exceed the calls that the agent has made."""
    *midway, final = episode.paid_N[agent]
    following = [paid for paid in midway if paid.calls >= call]
    total = sum(discount ** (paid.calls - call) * paid.value for paid in following)
    return total + discount ** max(0, final.calls - call) * final.value


def call_advantages(
    group: EpisodeGroup,
    agent: int,
    kind: str,
    *,
    discount: float,
    normalize: bool = False,
    greedy: Episode | None = None,
) -> list[list[float]]:
    """For each of G episodes, the advantage of each of the agent's calls.

    ``kind`` and ``normalize`` are those of ``sibling_advantages``; siblings are the j-th calls of
    all episodes. ``greedy``: the task's greedy episode, where ``kind`` asks for it.
    """
    counts = [len(episode.calls_of(agent)) for episode in group.episodes_G]
    found: list[list[float]] = [[] for _ in counts]
    for call in range(1, max(counts, default=0) + 1):
        baseline = None if greedy is None else return_to_go(greedy, agent, call, discount)
        advantages = sibling_advantages(
            [return_to_go(episode, agent, call, discount) for episode in group.episodes_G],
            kind,
            normalize=normalize,
            greedy_return=baseline,
        )
        for own, count, advantage in zip(found, counts, advantages, strict=True):
            if count >= call:
                own.append(advantage)
    return found


def call_rows(calls: Sequence[tuple[Call, float, int]]) -> list[Row]:
    """Rows of one agent's calls, each with its weight and its number.

    Calls whose prompts begin alike share a row: a prompt that continues another call's is that
    call's prompt and a context, which is computed once where siblings have it in common.
    """
    shared: dict[tuple[int, ...], list[tuple[Call, float, int]]] = {}
    for entry in calls:
        ids = entry[0].prompt_ids
        base = next((known for known in shared if ids[: len(known)] == known), ids)
        shared.setdefault(base, []).append(entry)
    return [_row(base, own) for base, own in shared.items()]


def _row(prompt_ids: tuple[int, ...], calls: Sequence[tuple[Call, float, int]]) -> Row:
    start = len(prompt_ids)
    contexts = [call.prompt_ids[start:] for call, _, _ in calls]
    completions = [call.completion for call, _, _ in calls]
    return Row(
        prompt_ids,
        tuple(context + c.token_ids for context, c in zip(contexts, completions, strict=True)),
        tuple(w * c.importance for (_, w, _), c in zip(calls, completions, strict=True)),
        tuple(number for *_, number in calls),
        support=tuple(c.support for c in completions if c.support is not None),
        importances=importances_of(completions),
        contexts=tuple(map(len, contexts)) if any(contexts) else (),
    )
