"""Validation of a vLLM server's replies, before anything is sampled, learned or printed.

Anything that is not of the documented form raises BadReply: a reply that is wrong once is not
asked for again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comlrl.errors import ServerError, UserError
from comlrl.quoting import one_line

KEY = "generation.vllm_url"
MAX_REPLY = 1 << 20  # bytes, beside those of the tokens that were asked for
TOKEN_BYTES = 1 << 10  # of a token: its id, its text (several times), its log-probability
ID_BYTES = 12  # of a token that survived truncation
LEAST_LOGPROB = -1e6  # vLLM writes −9999 for −∞
ROUNDING = 1e-3  # by which a log-probability may exceed 0


PASSING = frozenset({408, 429})  # statuses of errors that may pass, beside those from 500 on


class Unanswered(ServerError):
    """No connection, or none to the end of the answer."""

    may_pass = True

    def __init__(self, url: str, reason: str) -> None:
        self.reason = one_line(reason)
        super().__init__(f"{KEY}: '{url}': {self.reason}")


class Refused(ServerError):
    """The server has answered with an error, ``status``."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        self.status, self.reason = status, one_line(reason)
        self.may_pass = status >= 500 or status in PASSING
        super().__init__(f"{KEY}: '{url}' answers HTTP {status}: {self.reason}")


class BadReply(ServerError):
    """A reply that is not of the documented form."""

    def __init__(self, url: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{KEY}: '{url}' replies with {reason}; docs/scaling.md names the versions of vLLM "
            "that work"
        )


def base_model(url: str, reply: Any) -> tuple[str, int | None]:
    """Return the base model's name, and the server's token limit, if it reports one.

    Raises UserError: the request is made at the start of a run.
    """
    try:
        model = _models(url, reply)[0]
        length = model.get("max_model_len")
        if length is not None and (type(length) is not int or length < 1):
            raise BadReply(url, f"max_model_len={_shown(length)}, which is not a length")
    except BadReply as error:
        raise UserError(str(error)) from error
    return model["id"], length


def model_names(url: str, reply: Any) -> list[str]:
    """Return all names that requests may use: the base model and the adapters."""
    return [model["id"] for model in _models(url, reply)]


def _models(url: str, reply: Any) -> list[dict[str, Any]]:
    models = _mappings(reply.get("data")) if isinstance(reply, dict) else []
    if not models or not all(isinstance(model.get("id"), str) for model in models):
        raise BadReply(url, "no list of models")
    return models


def top_two(url: str, reply: Any) -> tuple[float, float]:
    """Return the two greatest log-probabilities at the first position of the only completion."""
    (choice,) = _choices(url, reply, 1)
    tops = _mappings(_logprobs(choice).get("top_logprobs"))
    values = list(tops[0].values()) if tops else []
    if len(values) < 2 or not all(map(_is_logprob, values)):
        raise BadReply(url, "no two log-probabilities at a position, which were asked for")
    first, second, *_ = sorted(map(float, values), reverse=True)
    return first, second


@dataclass(frozen=True, slots=True)
class Drawn:
    """A completion as a server drew it."""

    token_ids: tuple[int, ...]
    logprob_L: tuple[float, ...]
    support_L: (
        tuple[tuple[int, ...], ...] | None
    )  # the tokens that truncation left at each position

    def up_to(self, tokens: int) -> Drawn:
        """Return its first tokens."""
        support_L = None if self.support_L is None else self.support_L[:tokens]
        return Drawn(self.token_ids[:tokens], self.logprob_L[:tokens], support_L)


def completions(
    url: str, reply: Any, *, count: int, max_tokens: int, vocabulary: int, support: bool = False
) -> list[Drawn]:
    """Return the completions by index. ``support``: with the support of truncation."""
    return [
        _completion(url, choice, max_tokens, vocabulary, support)
        for choice in _choices(url, reply, count)
    ]


def _choices(url: str, reply: Any, count: int) -> list[dict[str, Any]]:
    choices = _mappings(reply.get("choices")) if isinstance(reply, dict) else []
    if not choices:
        raise BadReply(url, "no list of completions")
    indices: list[Any] = [choice.get("index") for choice in choices]
    if not all(type(index) is int for index in indices) or sorted(indices) != [*range(count)]:
        raise BadReply(url, f"completions {_shown(indices)}, where {count} were asked for")
    return sorted(choices, key=lambda choice: choice["index"])


def _completion(
    url: str, choice: Mapping[str, Any], max_tokens: int, vocabulary: int, support: bool
) -> Drawn:
    ids, logprobs = choice.get("token_ids"), _logprob_of_tokens(choice)
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        raise BadReply(url, "a completion without token ids and their log-probabilities")
    if not 1 <= len(ids) <= max_tokens:
        raise BadReply(url, f"a completion of {len(ids)} tokens, where 1 to {max_tokens} may be")
    if len(logprobs) != len(ids):
        raise BadReply(url, f"{len(ids)} tokens and {len(logprobs)} log-probabilities")
    _check_ids(url, ids, vocabulary)
    for value in logprobs:
        if not _is_logprob(value):
            raise BadReply(url, f"{_shown(value)} as a log-probability")
    sets = _support(url, choice, ids, vocabulary) if support else None
    return Drawn(tuple(ids), tuple(logprobs), sets)


def _logprob_of_tokens(choice: Mapping[str, Any]) -> Any:
    """Return each token's entry, in the form of /v1/completions or /inference/v1/generate."""
    found = _logprobs(choice)
    if "content" not in found:
        return found.get("token_logprobs")
    content = found["content"]
    listed = isinstance(content, list) and all(isinstance(item, dict) for item in content)
    return [item.get("logprob") for item in content] if listed else None


def _support(
    url: str, choice: Mapping[str, Any], ids: list[int], vocabulary: int
) -> tuple[tuple[int, ...], ...]:
    sets = choice.get("sampling_mask")
    if not isinstance(sets, list) or not all(isinstance(one, list) for one in sets):
        raise BadReply(url, "a completion without the tokens that survived truncation")
    if len(sets) != len(ids):
        raise BadReply(url, f"{len(ids)} tokens and {len(sets)} sets of survivors")
    for token, one in zip(ids, sets, strict=True):
        _check_ids(url, one, vocabulary)
        if token not in one or len(set(one)) < len(one):
            raise BadReply(url, f"token {token}, and {_shown(one)} as the survivors of its place")
    return tuple(map(tuple, sets))


def _check_ids(url: str, ids: list[Any], vocabulary: int) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadReply(url, f"token {_shown(token)}, and the model has {vocabulary}")


def _logprobs(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    found = choice.get("logprobs")
    return found if isinstance(found, dict) else {}


def _mappings(value: Any) -> list[dict[str, Any]]:
    """Return a list of mappings; empty if it is something else."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return []
    return value


def _is_logprob(value: Any) -> bool:
    """Return whether a value is a log-probability.

    Comparisons exclude NaN, and integers of any size need no conversion to float.
    """
    return type(value) in (int, float) and LEAST_LOGPROB <= value <= ROUNDING


def _shown(value: Any) -> str:
    return one_line(repr(value), 60)
