"""Calls of tools in a text, and texts that only look like them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comlrl.programs.tool_calls import ToolCall, parse, render

NAMES = {"add": {"a": "integer", "text": "string"}, "look_up": {}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ADD = '{"name": "add", "arguments": {"a": 1}}'


def test_calls_are_taken_out_of_the_text():
    two = f"First.\n{call(ADD)}\n{call(ADD)}"
    assert parse(two, NAMES) == ("First.", [ToolCall("add", '{"a": 1}')] * 2)
    assert parse(call(ADD), NAMES) == ("", [ToolCall("add", '{"a": 1}')])
    assert parse(f"<tool_call>{ADD}", NAMES)[1] == [ToolCall("add", '{"a": 1}')]  # its end was cut
    text = json.dumps({"name": "add", "arguments": '{"a": 1}'})
    assert parse(call(text), NAMES)[1] == [ToolCall("add", '{"a": 1}')]
    assert parse(call('{"name": "add"}'), NAMES)[1] == [ToolCall("add", "{}")]


def test_calls_of_qwen3_coder():
    body = (
        "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=text>\n2\n3\n</parameter>\n"
        "<parameter=list>\n[true]\n</parameter>\n</function>"
    )
    (made,) = parse(call(body), NAMES)[1]
    assert json.loads(made.arguments) == {"a": 1, "text": "2\n3", "list": [True]}
    assert parse(call("<function=look_up>\n</function>"), NAMES)[1] == [ToolCall("look_up", "{}")]
    assert parse(call("<function=sub>\n</function>"), NAMES)[1] == []


@pytest.mark.parametrize(
    "body",
    ["", "add(1)", "[]", "null", '{"name": "sub", "arguments": {}}', '{"arguments": {}}',
     '{"name": ["add"]}', '{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": "x"}',
     '{"name": "add", "arguments": {"a": NaN}}', "[" * 100_000, ADD + ADD, ADD[:-1]],
    ids=lambda body: body[:30],
)  # fmt: skip
def test_what_is_no_call_stays_text(body):
    for text in (call(body), f"{call(ADD)}{call(body)}"):
        assert parse(text, NAMES) == (text, [])


@settings(deadline=None)
@given(
    st.text(), st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(), JSON)))
)
def test_what_is_rendered_is_read_again(content, listed):
    content = content.replace("<tool_call>", "")
    calls = [ToolCall(name, json.dumps(arguments)) for name, arguments in listed]
    expected = content.strip() if calls else content
    if not any("tool_call>" in c.arguments for c in calls):
        assert parse(render(content, calls), NAMES) == (expected, calls)


@settings(deadline=None)
@given(st.text(alphabet='<tool_cal>/{}"name: ad,\n'))
def test_no_text_is_refused(text):
    content, calls = parse(text, NAMES)
    assert calls or content == text
