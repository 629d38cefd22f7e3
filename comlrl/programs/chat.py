"""Chat completions of the OpenAI API: parsing of requests and formatting of replies.

Parameters that would change the sampling policy, the one in training, are refused by name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comlrl.programs import tool_calls
from comlrl.programs.messages import messages, offered
from comlrl.programs.tool_calls import ToolCall
from comlrl.quoting import one_line
from comlrl.types import Completion, Message, Sampling

MAX_CHOICES = 128
MAX_STOPS, MAX_STOP = 16, 256  # texts, and characters of each
# Parameters that do not change the sampling policy.
WITHOUT_EFFECT = frozenset({
    "model", "messages", "user", "metadata", "store", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "service_tier", "parallel_tool_calls", "tools", "n",
})  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # other parameters' values without an effect
    "seed": (), "functions": ([],), "function_call": ("none", "auto"),
    "top_logprobs": (0,), "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "min_p": (0,), "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A validated request for chat completions."""

    prompt: tuple[Message, ...]  # the callable tools, if any, then the messages
    functions: Mapping[str, Mapping[str, Any]]  # callable functions → their parameters' types
    count: int  # of completions
    stop: tuple[str, ...]  # texts that end a completion, in addition to the run's
    logprobs: bool
    stream: bool
    stream_usage: bool  # whether a stream ends with the usage


class Written:
    """The exact texts of completions that were sent as tool calls, by the calls' ids.

    When a client sends these calls back, the conversation continues the sampled tokens exactly.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[str, ...], tuple[str, list[ToolCall], str]] = {}

    def keep(self, ids: Sequence[str], content: str, calls: list[ToolCall], text: str) -> None:
        """Store the text of the calls that were sent under these ids."""
        self._texts[tuple(ids)] = (content, calls, text)

    def text(self, ids: Sequence[str], content: str, calls: list[ToolCall]) -> str:
        """Return the stored text of an assistant's calls, or render them if they were changed."""
        *sent, text = self._texts.get(tuple(ids), ("", [], ""))
        return text if sent == [content, calls] and calls else tool_calls.render(content, calls)


def read_request(body: Mapping[str, Any], sampling: Sampling, written: Written) -> ChatRequest:
    """Parse a request; ``sampling`` is the agent's. Raises ValueError, naming a bad parameter."""
    _check_sampling(body, sampling)
    tools, functions = _tools(body)
    listed = body.get("messages")
    if not isinstance(listed, list):
        raise ValueError("messages: pass a list of objects with role and content")
    count = body.get("n")
    if count is not None and (type(count) is not int or not 1 <= count <= MAX_CHOICES):
        raise ValueError(f"n: {shown(count)}; use 1 to {MAX_CHOICES}")
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"stream_options: {shown(options)}; pass an object")
    return ChatRequest(
        prompt=tools + messages([_message(message, written) for message in listed]),
        functions=functions,
        count=count or 1,
        stop=_stops(body.get("stop")),
        logprobs=_flag(body, "logprobs"),
        stream=_flag(body, "stream"),
        stream_usage=_flag(options, "include_usage"),
    )


def shown(value: Any) -> str:
    """Return a request's value as one short line, for a message."""
    return one_line(repr(value), 60)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise ValueError(f"{name}: {shown(value)}; use true or false")
    return bool(value)


def _stops(value: Any) -> tuple[str, ...]:
    """Return the texts that end a completion. Raises ValueError if ``stop`` is malformed."""
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(listed, list)
        or len(listed) > MAX_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP for text in listed)
    ):
        raise ValueError(
            f"stop: {shown(value)}; pass up to {MAX_STOPS} texts of 1 to {MAX_STOP} characters"
        )
    return tuple(listed)


def _check_sampling(body: Mapping[str, Any], sampling: Sampling) -> None:
    """Raise ValueError for a parameter that would change the run's sampling distribution.

    A greedy evaluation overrides the requested temperature, top_p and top_k.
    """
    policy = {
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k,
    }
    elsewhere = {"stream", "stream_options", "stop", "logprobs", "tool_choice"}
    for name, value in body.items():
        if value is None or name in WITHOUT_EFFECT or name in elsewhere:
            continue
        if name in ("max_tokens", "max_completion_tokens"):
            if not isinstance(value, int) or value < sampling.max_new_tokens:
                raise ValueError(
                    f"{name}: {shown(value)}; the run's max_new_tokens is "
                    f"{sampling.max_new_tokens}: leave it out, or use at least that"
                )
        elif name in policy:
            if value != policy[name] and sampling.temperature > 0:
                raise ValueError(
                    f"{name}: {shown(value)}; the run samples with {policy[name]}: leave it out"
                )
        elif value not in NEUTRAL.get(name, ()):
            raise ValueError(
                f"{one_line(name, 60)}: {shown(value)} is not supported here: leave it out"
            )


def _tools(
    body: Mapping[str, Any],
) -> tuple[tuple[Message, ...], dict[str, dict[str, Any]]]:
    """Return the tools as the start of the prompt, and their parameters' types.

    Both are empty if ``tool_choice`` is "none". If it names a function, the template shows only
    that one. No choice constrains sampling. Raises ValueError for malformed tools or choices.
    """
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    shown_tools = offered(tools)
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ValueError(f"tool_choice: {shown(choice)} is not one of the tools")
        shown_tools = offered(tools)
    elif choice not in (None, "none", "auto", "required"):
        raise ValueError(f"tool_choice: {shown(choice)}; use none, auto, required or a function")
    if not tools or choice == "none":
        return (), {}
    return shown_tools, {tool["function"]["name"]: _types(tool["function"]) for tool in tools}


def _types(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON types of a function's parameters, as far as its schema states them."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return {
        name: schema.get("type")
        for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
        if isinstance(schema, Mapping)
    }


def _message(message: Any, written: Written) -> Message:
    """Convert a request's message to the agent's format. Raises ValueError if malformed."""
    if not isinstance(message, Mapping):
        raise ValueError(f"messages: {shown(message)}; pass an object with role and content")
    role, content, name = (message.get(key) for key in ("role", "content", "name"))
    if isinstance(content, list):
        content = "".join(map(_text, content))
    if not isinstance(content, str | None):
        raise ValueError(f"messages: content: {shown(content)}; pass a text")
    content = content or ""
    if message.get("function_call"):
        raise ValueError("messages: function_call is not supported here; use tool_calls")
    if listed := message.get("tool_calls"):
        if role != "assistant":
            raise ValueError(f"messages: tool_calls of the role {shown(role)}; only an assistant's")
        content = _with_calls(content, listed, written)
    if isinstance(name, str) and role != "tool":  # a tool message names the function
        content = f"{name}: {content}"
    return Message("system" if role == "developer" else role, content)  # type: ignore[arg-type]


def _with_calls(content: str, listed: Any, written: Written) -> str:
    """Return an assistant's text with its calls. Raises ValueError for a malformed call."""
    ids, calls = [], []
    for call in listed if isinstance(listed, list) else [listed]:
        function = call.get("function") if isinstance(call, Mapping) else None
        name, arguments = (
            (function.get("name"), function.get("arguments"))
            if isinstance(function, Mapping)
            else (None, None)
        )
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise ValueError(
                f"messages: tool_calls: {shown(call)}; pass functions with name and arguments"
            )
        ids.append(str(call.get("id")))
        calls.append(ToolCall(name, arguments))
    return written.text(ids, content, calls)


def _text(part: Any) -> str:
    """Return the text of a message part. Raises ValueError for a part that is not text."""
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ValueError("messages: only parts of type text are supported")
    return text


def reply(
    request: ChatRequest,
    model: str,
    drawn: Sequence[Completion],
    prompt_tokens: int,
    tokens_of: Mapping[int, str],
    written: Written,
) -> dict[str, Any]:
    """Return the reply. ``tokens_of`` maps token ids to texts, for log-probabilities."""
    new = sum(len(completion.token_ids) for completion in drawn)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _choice(i, completion, request, tokens_of, written)
            for i, completion in enumerate(drawn)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens, "completion_tokens": new,
            "total_tokens": prompt_tokens + new,
        },
    }  # fmt: skip


def _choice(
    index: int,
    completion: Completion,
    request: ChatRequest,
    tokens_of: Mapping[int, str],
    written: Written,
) -> dict[str, Any]:
    content = completion.text
    calls: list[ToolCall] = []
    if request.functions:
        content, calls = tool_calls.parse(completion.text, request.functions)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    reason = "stop" if completion.finished else "length"
    if calls:
        ids = [f"call_{secrets.token_hex(12)}" for _ in calls]
        written.keep(ids, content, calls, completion.text)
        message["tool_calls"] = [
            {"id": number, "type": "function", "function": call._asdict()}
            for number, call in zip(ids, calls, strict=True)
        ]
        reason = "tool_calls" if completion.finished else "length"
    with_logprobs = request.logprobs and completion.logprob_L  # greedy completions have none
    logprobs = _logprobs(completion, tokens_of) if with_logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(completion: Completion, tokens_of: Mapping[int, str]) -> dict[str, Any]:
    """Return each token's log-probability under the sampling distribution."""
    content = [
        {
            "token": tokens_of[token], "logprob": value,
            "bytes": list(tokens_of[token].encode()), "top_logprobs": [],
        }
        for token, value in zip(completion.token_ids, completion.logprob_L, strict=True)
    ]  # fmt: skip
    return {"content": content, "refusal": None}


def chunks(completion: Mapping[str, Any], usage: bool) -> Iterator[str]:
    """Yield a reply as server-sent events: per choice a message and a finish reason, then usage."""
    head = {key: completion[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"

    def event(*choices: Mapping[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    for choice in completion["choices"]:
        message, index = dict(choice["message"]), choice["index"]
        if "tool_calls" in message:
            calls = message["tool_calls"]
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        delta = {"index": index, "delta": message, "finish_reason": None}
        yield event({**delta, "logprobs": choice["logprobs"]})
        yield event({"index": index, "delta": {}, "finish_reason": choice["finish_reason"]})
    if usage:
        yield event(usage=completion["usage"])
    yield "data: [DONE]\n\n"
