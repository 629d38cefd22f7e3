"""``prompts.style: dividing`` tells each agent its part, whatever the team and the problem."""

from __future__ import annotations

import pytest

from comlrl.errors import UserError
from comlrl.rewards.code.domain import CODE
from comlrl.tasks.prompts import Prompts
from tests.support.fakes import code_task

ITEMS = 'def f(xs, k=2):\n    """Return the sum of the even numbers in xs."""\n'
NUMBER = 'def f(n: int) -> int:\n    """Return the square root of n, rounded down."""\n'


def prompts(problem: str, num_agents: int, chats: bool, **own: str) -> tuple[list[str], list[str]]:
    """What the agents read first, and how their answers start."""
    task = code_task("t", problem, "def check(c):\n    assert c(1) == 1\n", "f")
    made = Prompts(CODE, {"style": "dividing", **own}, (chats,) * num_agents)
    first = list(made.first(task, num_agents))
    return first, [made.prefill(task, agent, num_agents) for agent in range(num_agents)]


@pytest.mark.parametrize("chats", [False, True])
@pytest.mark.parametrize("num_agents", [2, 3, 6])
def test_each_agent_reads_its_part(num_agents, chats):
    first, prefills = prompts(ITEMS, num_agents, chats)
    assert len(set(first)) == num_agents
    assert all(text.count("do this work") == 1 for text in first)
    assert "picks the items" in first[0] and "returns them as a list" in first[0]
    helpers = ("aux", "aux2", "aux3", "aux4", "aux5")[: num_agents - 1]
    for name, text in zip(helpers, first, strict=False):
        assert f"`{name}(xs, k=2)`" in text
        assert f"`{name}`" in first[-1] or f"{name}(" in first[-1]
    if chats:
        assert prefills[-1].endswith("".join(f"\n    {n.replace('aux', 'part')} = {n}(xs, k)"
                                             for n in helpers))  # fmt: skip
        assert prefills[0].endswith("def aux(xs, k=2):")
    else:
        assert set(prefills) == {""}


@pytest.mark.parametrize("chats", [False, True])
@pytest.mark.parametrize("num_agents", [2, 3])
def test_no_list_is_spoken_of_where_there_is_none(num_agents, chats):
    first, _ = prompts(NUMBER, num_agents, chats)
    assert not [text for text in first if "list" in text or "items" in text]


@pytest.mark.parametrize("chats", [False, True])
def test_an_agent_alone_has_the_usual_prompt(chats):
    task = code_task("t", ITEMS, "def check(c):\n    assert c([1]) == 1\n", "f")
    assert prompts(ITEMS, 1, chats)[0] == list(Prompts(CODE, None, (chats,)).first(task, 1))


def test_own_templates_replace_those_of_the_style():
    first, prefills = prompts(ITEMS, 2, True, aux="Write {name}. {division}", prefill="")
    assert first[0].startswith("Write aux. Two functions") and "`part`" in first[1]
    assert prefills == ["", ""]


def test_another_style_is_refused():
    with pytest.raises(UserError, match=r"prompts\.style: 'split'.*usual.*dividing"):
        Prompts(CODE, {"style": "split"})
