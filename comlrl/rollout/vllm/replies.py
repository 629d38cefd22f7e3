"""Validation of a vLLM server's replies, before anything is sampled, learned or printed.

Replies that do not have the documented form raise BadReply, and are not requested again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comlrl.errors import ServerError
from comlrl.quoting import one_line

KEY = "generation.vllm_url"
LEAST_LOGPROB = -1e6  # vLLM writes −9999 for −∞
ROUNDING = 1e-3  # by which a log-probability may exceed 0


class BadReply(ServerError):
    """A reply that is not of the documented form."""

    def __init__(self, url: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{KEY}: '{url}' replies with {reason}; docs/scaling.md names the versions of vLLM "
            "that work"
        )


def models(url: str, reply: Any) -> tuple[list[str], int | None]:
    """Return the names that requests may use, the base model's first, and the server's token
    limit, if it reports one."""
    entries = _mappings(reply.get("data")) if isinstance(reply, dict) else []
    if not entries or not all(isinstance(entry.get("id"), str) for entry in entries):
        raise BadReply(url, "no list of models")
    length = entries[0].get("max_model_len")
    if length is not None and (type(length) is not int or length < 1):
        raise BadReply(url, f"max_model_len={_shown(length)}, which is not a length")
    return [entry["id"] for entry in entries], length


@dataclass(frozen=True, slots=True)
class Drawn:
    """A completion that a server sampled. ``support_L``: the tokens that truncation left at each
    position."""

    token_ids: tuple[int, ...]
    logprob_L: tuple[float, ...]
    support_L: tuple[tuple[int, ...], ...] | None


def completions(
    url: str, reply: Any, *, count: int, max_tokens: int, vocabulary: int, support: bool = False
) -> list[Drawn]:
    """Check and return completions, by index. ``support``: require the support of truncation."""
    choices = _mappings(reply.get("choices")) if isinstance(reply, dict) else []
    indices: list[Any] = [choice.get("index") for choice in choices]
    if not all(type(index) is int for index in indices) or sorted(indices) != [*range(count)]:
        raise BadReply(url, f"completions {_shown(indices)}, where {count} were asked for")
    choices.sort(key=lambda choice: choice["index"])
    return [_completion(url, choice, max_tokens, vocabulary, support) for choice in choices]


def _completion(
    url: str, choice: Mapping[str, Any], max_tokens: int, vocabulary: int, support: bool
) -> Drawn:
    ids, logprobs = choice.get("token_ids"), _logprobs(choice)
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        raise BadReply(url, "a completion without token ids and their log-probabilities")
    if not 1 <= len(ids) <= max_tokens:
        raise BadReply(url, f"a completion of {len(ids)} tokens, where 1 to {max_tokens} may be")
    if len(logprobs) != len(ids):
        raise BadReply(url, f"{len(ids)} tokens and {len(logprobs)} log-probabilities")
    _check_ids(url, ids, vocabulary)
    for value in logprobs:
        # Comparisons exclude NaN, and integers of any size need no conversion to float.
        if type(value) not in (int, float) or not LEAST_LOGPROB <= value <= ROUNDING:
            raise BadReply(url, f"{_shown(value)} as a log-probability")
    sets = _support(url, choice, ids, vocabulary) if support else None
    return Drawn(tuple(ids), tuple(logprobs), sets)


def _logprobs(choice: Mapping[str, Any]) -> Any:
    """Return each token's entry, in the form of /v1/completions or /inference/v1/generate."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    if "content" not in logprobs:
        return logprobs.get("token_logprobs")
    return [entry.get("logprob") for entry in _mappings(logprobs["content"])]


def _support(
    url: str, choice: Mapping[str, Any], ids: list[int], vocabulary: int
) -> tuple[tuple[int, ...], ...]:
    sets = choice.get("sampling_mask")
    if not isinstance(sets, list) or not all(isinstance(survivors, list) for survivors in sets):
        raise BadReply(url, "a completion without the tokens that survived truncation")
    if len(sets) != len(ids):
        raise BadReply(url, f"{len(ids)} tokens and {len(sets)} sets of survivors")
    for token, survivors in zip(ids, sets, strict=True):
        _check_ids(url, survivors, vocabulary)
        if token not in survivors or len(set(survivors)) < len(survivors):
            shown = _shown(survivors)
            raise BadReply(url, f"token {token}, and {shown} as the survivors of its place")
    return tuple(map(tuple, sets))


def _check_ids(url: str, ids: list[Any], vocabulary: int) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadReply(
                url, f"token {_shown(token)}, and the model's vocabulary is of {vocabulary}"
            )


def _mappings(value: Any) -> list[dict[str, Any]]:
    """Return the value if it is a list of mappings, else an empty list."""
    is_list = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    return value if is_list else []


def _shown(value: Any) -> str:
    return one_line(repr(value), 60)
