"""Encoding of prompts: messages → token ids of a model."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from tokenizers import AddedToken

from comlrl.errors import UserError
from comlrl.quoting import one_line
from comlrl.tasks.prompts import plain_text, split_prefill
from comlrl.types import Message

MARK = "\U0010fffd"  # the last private-use character; splits control tokens in texts


@dataclass(frozen=True)
class PromptEncoder:
    """Encoder of prompts into a model's tokens; it needs no weights.

    Control tokens are special tokens, and added tokens other than words and white space. Only the
    chat template and messages with ``verbatim`` may produce them. In the texts of other messages
    they are split in two and encoded as text. Prompts without control tokens are encoded as by the
    tokenizer alone.
    """

    tokenizer: Any
    chat: Literal["auto", True, False] = "auto"  # ``agent_model.chat``
    ends: tuple[int, ...] = ()  # EOS tokens of the model, besides the tokenizer's
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chat is True and not self.tokenizer.chat_template:
            raise UserError(
                f"agent_model.chat: true, and the tokenizer of '{self.tokenizer.name_or_path}' has "
                "no chat template; use auto, or set agent_model.tokenizer_kwargs.chat_template"
            )

    @property
    def chats(self) -> bool:
        """Return whether prompts use the model's chat template, not plain text."""
        return self.form[0]

    @cached_property
    def form(self) -> tuple[bool, str]:
        """``chats``, and the reason for it.

        A base model's tokenizer may have the template of the chat model, whose end of a turn the
        base model does not know.
        """
        if not self.tokenizer.chat_template:
            return False, "the tokenizer has no chat template"
        if self.chat != "auto":
            return self.chat, f"agent_model.chat={str(self.chat).lower()}"
        if self.end_of_turn is None:
            return True, "the tokenizer has a chat template"
        end, is_end = self.tokenizer.convert_ids_to_tokens(self.end_of_turn), "is the model's end"
        if self.end_of_turn in {self.tokenizer.eos_token_id, *self.ends}:
            return True, f"the chat template's end of turn, {end}, {is_end} of sequence"
        eos = self.tokenizer.eos_token
        return False, f"the chat template's end of turn, {end}, is not the model's end, {eos}"

    @cached_property
    def end_of_turn(self) -> int | None:
        """The control token that the chat template puts after an answer, if any."""
        question, answer = "x7asked7x", "x7answered7x"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, **self.template_arguments
            )
        except Exception:  # a template may raise anything for messages that it rejects
            return None
        if answer not in text:
            return None
        ids = self.tokenizer(text.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
        control = self._control | {self.tokenizer.eos_token_id, *self.ends}
        return next((i for i in ids if i in control), None)

    def encode(self, prompt: Sequence[Message]) -> list[int]:
        """Return a prompt's token ids, by the chat template if ``chats``, else as plain text.

        A final assistant message is left open for the model to continue. Raises UserError for
        messages that the chat template does not support.
        """
        offers = any(message.role == "tools" for message in prompt)
        if offers and not (self.chats and self._shows_offered_tools):
            raise UserError(
                f"'{self.tokenizer.name_or_path}' has no chat template that shows tools; describe "
                "them in a message"
            )
        if self.chats:
            if any(message.role == "tool" for message in prompt) and not self._shows_tools:
                raise UserError(
                    f"the chat template of '{self.tokenizer.name_or_path}' does not support the "
                    "role tool; pass what a tool returns as a user's message"
                )
            return self._ids(self._templated(self._marked(prompt)), add_special_tokens=False)
        ids = self._ids(plain_text(self._marked(prompt)))
        return ids[: len(ids) - self.appended]

    @cached_property
    def appended(self) -> int:
        """Number of special tokens that the tokenizer appends to a text; prompts omit them."""
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        ids = self.tokenizer("a")["input_ids"]
        ends = (end for end in range(len(ids), 0, -1) if ids[:end][-len(bare) :] == bare)
        return len(ids) - next(ends, len(ids))

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text alone, none of them a control token."""
        return self._ids(self._marked_text(text), add_special_tokens=False)

    def _ids(self, text: str, **settings: Any) -> list[int]:
        """Return the ids of a text; control tokens after a ``MARK`` are ordinary text."""
        if MARK not in text:
            return self.tokenizer(text, **settings)["input_ids"]
        split = re.sub(f"{MARK}(.)", rf"\1{MARK}", text, flags=re.DOTALL)
        ids = self._splitting(split, **settings)["input_ids"]
        mark = self._splitting.convert_tokens_to_ids(MARK)
        return [i for i in ids if i != mark]

    def _marked(self, prompt: Sequence[Message]) -> tuple[Message, ...]:
        """Insert a ``MARK`` before each control token of the texts.

        Template code that searches for such tokens, e.g. the end of a thought, still finds them.
        """
        return tuple(
            m if m.verbatim else replace(m, content=self._marked_text(_unescaped(m)))
            for m in prompt
        )

    def _marked_text(self, text: str) -> str:
        text = text.replace(MARK, "?")
        places = self._places(text, self.tokenizer)
        while places:
            # After one character of each is split off, the rest may contain another one.
            parts = [text[a + 1 : b + 1] for a, b in itertools.pairwise([-1, *places, len(text)])]
            text = MARK.join(parts)
            places = self._places(text, self._splitting)
        return re.sub(f"(.){MARK}", rf"{MARK}\1", text, flags=re.DOTALL)

    def _places(self, text: str, tokenizer: Any) -> list[int]:
        """Return the positions in a text at which control tokens begin."""
        if not tokenizer.is_fast:
            return [match.start() for match in self._control_texts.finditer(text)]
        read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = zip(read["input_ids"], read["offset_mapping"], strict=True)
        places = []
        for token, (start, end) in spans:
            if token in self._control:
                shown = text[start:end].strip()  # some tokens include adjacent spaces
                unknown = token == self.tokenizer.unk_token_id and shown != self.tokenizer.unk_token
                if len(shown) > 1 and not unknown:
                    places.append(text.index(shown, start))
        return places

    @cached_property
    def _control(self) -> frozenset[int]:
        template = str(self.tokenizer.chat_template)
        return frozenset(
            number
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if len(token.content.strip()) > 1
            and (token.special or not token.content.isalnum() or token.content in template)
        )

    @cached_property
    def _control_texts(self) -> re.Pattern[str]:
        texts = [self.tokenizer.added_tokens_decoder[number].content for number in self._control]
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")

    @cached_property
    def _splitting(self) -> Any:
        """A copy of the tokenizer, with ``MARK`` as an additional token."""
        splitting = copy.deepcopy(self.tokenizer)
        splitting.add_tokens(
            [AddedToken(MARK, special=True, normalized=False)], special_tokens=True
        )
        return splitting

    def _templated(self, prompt: Sequence[Message]) -> str:
        shown, prefill = split_prefill([m for m in prompt if m.role != "tools"])
        messages = [{"role": m.role, "content": m.content} for m in shown]
        tools = [tool for m in prompt if m.role == "tools" for tool in json.loads(m.content)]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=True,
                **self.template_arguments,
            )
            return text + prefill
        except Exception as error:  # from template code, or without a default template
            roles = ", ".join(message.role for message in prompt)
            raise UserError(
                f"the chat template of '{self.tokenizer.name_or_path}' refuses messages of the "
                f"roles {roles}: {one_line(str(error))}"
            ) from error

    @cached_property
    def opens_thought(self) -> bool:
        """Return whether the chat template begins each answer with an open ``<think>`` tag."""
        if not self.chats:
            return False
        try:
            prompt = self._templated([Message("user", "a")])
        except UserError:
            return False
        return re.search(r"<[^\w/]?think(?:ing)?[^\w/]?>\s*$", prompt) is not None

    @cached_property
    def _shows_tools(self) -> bool:
        """Return whether the chat template renders tools' results."""
        returned = "x7returned7x"
        return self._shows(
            returned, Message("user", "a"), Message("assistant", "b"), Message("tool", returned)
        )

    @cached_property
    def _shows_offered_tools(self) -> bool:
        """Return whether the chat template renders the tools that may be called."""
        name = "x7offered7x"
        parameters = {"type": "object", "properties": {}}
        function = {"name": name, "description": "a", "parameters": parameters}
        tools = json.dumps([{"type": "function", "function": function}])
        return self._shows(name, Message("tools", tools), Message("user", "a"))

    def _shows(self, text: str, *prompt: Message) -> bool:
        try:
            return text in self._templated(prompt)
        except UserError:
            return False


def end_ids(config: Any) -> tuple[int, ...]:
    """Return the EOS token ids of a generation config or model config."""
    listed = getattr(config, "eos_token_id", None)
    return tuple(listed) if isinstance(listed, list) else () if listed is None else (listed,)


def _unescaped(message: Message) -> str:
    """Return a message's text; tool JSON without escapes, which could hide a control token."""
    if message.role != "tools":
        return message.content
    return json.dumps(json.loads(message.content), ensure_ascii=False)
