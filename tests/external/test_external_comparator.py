"""A judge of two joint answers, against a local server."""

from __future__ import annotations

import json

import pytest

from comlrl.errors import UserError
from external.comparator import MODEL, Judge, judge_of, question, verdict
from external.service import ExpertError, Service, provider_of
from tests.support.fakes import PROMPTS, task
from tests.support.local_server import completion, send, serving


def judge(url: str) -> Judge:
    return Judge(PROMPTS, Service("any", provider_of("any", url), "test", retries=1, backoff=0.01))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("A", 1), ("B.", -1), ("**TIE**", 0), ("I like B, but A is right: A", 1), ("tie", 0),
        ("Neither, really", None), ("", None), ("Another team", None),
    ],
)  # fmt: skip
def test_answers_are_read(answer, expected):
    assert verdict(answer) == expected


def test_names_and_addresses():
    assert judge_of("gpt-5")[1].base_url == "https://api.openai.com/v1"
    assert judge_of("http://here:1/v1")[0] == MODEL
    model, provider = judge_of("http://here:1/v1#own/judge")
    assert (model, provider.base_url) == ("own/judge", "http://here:1/v1")
    with pytest.raises(UserError):
        judge_of("nobody-knows")


def test_it_is_asked_about_each_pair_and_sees_all_prompts():
    seen: list[str] = []

    def answer(handler, body):
        asked = json.loads(body)["messages"][0]["content"]
        seen.append(asked)
        send(handler, completion("A" if "[A]\ngood" in asked else "who knows"))

    good, bad = ("good aux", "good main"), ("bad aux", "bad main")
    with serving(answer) as url:
        assert judge(url)(task(), [(good, bad), (bad, good)]) == [1, None]
    assert sorted(seen) == sorted(question(PROMPTS, task(), *p) for p in [(good, bad), (bad, good)])
    for text in (*PROMPTS.texts(task(), 2), *good, *bad):
        assert text.strip("\n") in seen[0]


def test_a_judge_that_cannot_be_had_ends_the_run():
    failing = serving(lambda handler, body: send(handler, b"{}", 500))
    with failing as url, pytest.raises(ExpertError, match=r"2 requests.*comparator"):
        judge(url)(task(), [(("a", "b"), ("c", "d"))])
