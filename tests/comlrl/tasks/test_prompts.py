"""A domain's templates and the user's own in their places, filled with a task's fields."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from comlrl.errors import UserError
from comlrl.tasks.prompts import Prompts, check_templates, plain_text
from comlrl.types import Attempt, Domain, Message, Score, Task


class Duet(Domain):
    """Two voices of one song."""

    fields = ("title", "voice")
    revision = "Sing {voice} of {title} again.\n"

    def roles(self, num_agents: int) -> tuple[str, ...]:
        return ("high", "low")[:num_agents]

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return ("{title}: sing {voice}.\n",) * num_agents

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        names = self.roles(num_agents)
        return tuple({"title": task.fields["title"], "voice": f"the {name} one"} for name in names)


SONG = Task("s", {"title": "{Braces} {0} %s"})
ATTEMPT = Attempt(SONG, ("la", "lo"), Score(0.5), 1)


def test_each_agent_reads_its_template_with_the_tasks_values():
    prompts = Prompts(Duet())
    title = "{Braces} {0} %s"  # as it stands
    assert prompts.first(SONG, 2) == (
        f"{title}: sing the high one.\n",
        f"{title}: sing the low one.\n",
    )
    assert prompts.first(SONG, 1) == (f"{title}: sing the high one.\n",)
    assert prompts.revision_N(ATTEMPT) == (
        f"Sing the high one of {title} again.\n",
        f"Sing the low one of {title} again.\n",
    )
    assert prompts.parts(ATTEMPT) == ("high", "low")  # where a domain names no parts: its roles
    assert prompts.opening == ()


def test_the_users_own_stand_in_the_domains_places():
    own = {"low": "Hum {voice}.", "revision": "Once more, {voice}!", "system": "You {sing}."}
    prompts = Prompts(Duet(), own)
    assert prompts.first(SONG, 2)[0] == Prompts(Duet()).first(SONG, 2)[0]
    assert prompts.first(SONG, 2)[1] == "Hum the low one."
    assert prompts.revision_N(ATTEMPT) == ("Once more, the high one!", "Once more, the low one!")
    assert prompts.opening == (Message("system", "You {sing}."),)  # no template
    assert prompts.texts(SONG, 2)[1] == "You {sing}.\nHum the low one."


class Talkative(Duet):
    revision = "Please sing {voice} again.\n"

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return ("Please sing {voice}.\n",) * num_agents

    def handed_on(self, task, agent, num_agents, written):
        return f"Before you: {written[0]}"


class Both(Duet):
    def for_chat(self) -> Duet:
        return Talkative()


def test_an_agent_whose_model_chats_reads_the_domains_words_for_that():
    prompts = Prompts(Both(), chats_N=(False, True))
    assert prompts.first(SONG, 2) == (
        Prompts(Duet()).first(SONG, 2)[0], "Please sing the low one.\n"
    )  # fmt: skip
    assert prompts.revision_N(ATTEMPT) == (
        Prompts(Duet()).revision_N(ATTEMPT)[0], "Please sing the low one again.\n"
    )  # fmt: skip
    assert prompts.handed_on(SONG, 1, 2, ["la"]) == "Before you: la"
    assert Prompts(Both()).first(SONG, 2) == Prompts(Duet()).first(SONG, 2)  # it is not known
    own = Prompts(Both(), {"low": "Hum {voice}."}, (False, True))
    assert own.first(SONG, 2)[1] == "Hum the low one."  # the user's words before all


def test_how_every_answer_starts():
    class Prefilled(Duet):
        def for_chat(self) -> Duet:
            worded = Talkative()
            worded.prefill = "I sing {voice}:"
            return worded

    prompts = Prompts(Prefilled(), chats_N=(False, True))
    assert [prompts.prefill(SONG, i, 2) for i in range(2)] == ["", "I sing the low one:"]
    own = Prompts(Prefilled(), {"prefill": "{title}: "}, (False, True))
    assert [own.prefill(SONG, i, 2) for i in range(2)] == ["{Braces} {0} %s: "] * 2
    assert Prompts(Prefilled(), {"prefill": ""}, (True, True)).prefill(SONG, 1, 2) == ""
    read = Prompts(Prefilled(), {"system": "Sing."}, (False, True)).first_N(SONG, 2)
    assert [[m.role for m in prompt] for prompt in read] == [
        ["system", "user"], ["system", "user", "assistant"]
    ]  # fmt: skip
    assert read[1][1:] == (
        Message("user", "Please sing the low one.\n"), Message("assistant", "I sing the low one:")
    )  # fmt: skip


@pytest.mark.parametrize("name", ["revision", "prefill"])
def test_the_words_for_chat_are_checked_too(name):
    class Wrong(Talkative): ...

    setattr(Wrong, name, "Again, {voise}!")

    class Given(Duet):
        def for_chat(self) -> Duet:
            return Wrong()

    with pytest.raises(UserError, match=rf"domain: its `{name}`: .*\{{voise\}}; did you mean"):
        check_templates(Prompts(Given()), ("high", "low"), 2)


def test_as_many_roles_as_templates():
    with pytest.raises(ValueError, match=r"longer|shorter"):
        Prompts(Duet()).first(SONG, 3)


def test_a_conversation_as_plain_text_has_one_empty_line_between_messages():
    messages = (Message("user", "a\n\n"), Message("assistant", "b"), Message("user", "c"))
    assert plain_text(messages) == "a\n\nb\n\nc\n"
    start = Message("assistant", "d = [")  # the answer is to continue it
    assert plain_text((*messages, start)) == "a\n\nb\n\nc\n\nd = ["
    assert plain_text((start,)) == "d = ["


def test_what_is_handed_on_is_quoted_line_by_line():
    assert Duet().handed_on(SONG, 2, 3, ["la\n\nla", "lo"]) == (
        "high, as it was written:\n> la\n> \n> la\n\nlow, as it was written:\n> lo\n"
    )
