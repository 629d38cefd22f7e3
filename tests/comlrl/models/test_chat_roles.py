"""Messages that a chat template has no place for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from comlrl.errors import UserError
from comlrl.models.agent import Agent
from comlrl.types import Message
from tests.support.tiny_models import CHAT, tokenizer

CALLED = (Message("user", "2+2"), Message("assistant", "add(2, 2)"), Message("tool", "4"))
SYSTEM = (Message("system", "Be brief."), Message("user", "2+2"))
WITHOUT_TOOLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no\nsystem') }}{% endif %}x"


def agent(template: str | None) -> Agent:
    words = tokenizer(chat=True)
    words.chat_template = template
    model: Any = SimpleNamespace()
    return Agent(index=0, model=model, tokenizer=words, peft=None)


def test_roles_that_a_template_has():
    for template in (CHAT, None):
        for prompt in (CALLED, SYSTEM):
            one = agent(template)
            text = one.decode(one.encode(prompt))
            assert all(message.content in text for message in prompt)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content.encode('latin-1').nothing.more }}",
        "{{ messages[9].content.x.y }}",
        "{{ 1 / 0 }}",
        "{% for %}",
        {"tool_use": "{{ messages }}", "rag": "{{ messages }}"},  # no default
    ],
)
def test_a_template_that_fails_is_one_line(template):
    """Whatever it raises: it is code that came with the model."""
    with pytest.raises(UserError, match="chat template") as caught:
        agent(template).encode(SYSTEM)
    assert "\n" not in str(caught.value)


def test_roles_that_it_lacks():
    with pytest.raises(UserError, match="does not support the role tool; pass what a tool return"):
        agent(WITHOUT_TOOLS).encode(CALLED)
    with pytest.raises(UserError, match=r"refuses messages of the roles system, user: no system$"):
        agent(STRICT).encode(SYSTEM)
    assert agent(STRICT).encode(SYSTEM[1:])


TOOL = {"type": "function", "function": {"name": "add", "description": "adds"}}
OFFERED = (Message("tools", json.dumps([TOOL])), Message("user", "2+2"))
SHOWING = (
    "{% for t in tools or [] %}[{{ t.function.name }}: {{ t.function.description }}]{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_a_template_shows_the_tools_that_it_is_given():
    one = agent(SHOWING)
    assert one.decode(one.encode(OFFERED)) == "[add: adds]2+2"
    assert one.decode(one.encode(OFFERED[1:])) == "2+2"


@pytest.mark.parametrize("template", [CHAT, None], ids=["without tools", "plain text"])
def test_a_template_that_shows_none_is_named(template):
    with pytest.raises(UserError, match="no chat template that shows tools; describe them in a"):
        agent(template).encode(OFFERED)
