"""Training situations of tiny-player: prompts of the arena's games, as agents meet them.

Each comes with its legal answers, and with what a player may need to know to choose among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from comlrl.rewards.arena.game import Game, PartnersAnswer
from comlrl.rewards.arena.games import ARENA
from comlrl.tasks.history import Exchange, next_prompt, with_handed_on
from comlrl.tasks.prompts import Prompts, plain_text
from comlrl.types import Attempt, Message, Score, Task
from tools.make_arena import NUMBERS, QUESTIONS, SYMBOLS

TURNS = (2, 2, 2, 3, 3, 4, 5)  # the turn that is shown, as often as it is met
SEQUENTIAL = 0.5  # prompts that show what was written before in the turn
VARYING = ("arena-codebook", "arena-shards")  # in the words that are legal
LAST_ONLY = 0.2  # conversations of which the last turn alone is shown


@dataclass(frozen=True, slots=True)
class Situation:
    """A prompt, the answers to it, and what it says."""

    prompt: str
    answers: tuple[str, ...]
    contents: tuple[str, ...]  # by place; a place means the same in all situations of a game


def situations(seed: int, game: str | None = None) -> Iterator[Situation]:
    """Yield endless situations of one game, or of all in turn, more of those that vary more."""
    rng = random.Random(f"situations/{seed}")
    names = [game] if game else [*ARENA, *VARYING * 2]
    while True:
        for name in names:
            yield situation(rng, ARENA[name])


def situation(rng: random.Random, game: Game) -> Situation:
    """Return one agent's prompt at some turn of a game."""
    task = Task("pretraining", {"game": game.name, **ROWS.get(game.name, lambda _: {})(rng)})
    least, most = game.agents
    count = rng.randint(least, most)
    agent, prompts = rng.randrange(count), Prompts(game)
    if game.name == "arena-shards" and rng.random() < 0.5:
        agent = count - 1  # the judge
    answers = game.legal(task, agent, count)
    first = prompts.first(task, count)
    if game.modes() and rng.random() < 0.6:
        return _later_turn(rng, game, task, agent, prompts)
    drawn = [rng.choice(game.legal(task, other, count)) for other in range(agent)]
    shown = agent > 0 and rng.random() < SEQUENTIAL
    if game.name in ("arena-shards", "arena-codebook"):
        shown = agent == count - 1 and rng.random() < 0.9
    text = first[agent]
    if shown:
        text = with_handed_on(text, game.handed_on(task, agent, count, drawn))
    contents = (*_private_texts(task, agent, count), *(drawn if shown else []))
    return Situation(plain_text((Message("user", text),)), answers, contents)


def _later_turn(
    rng: random.Random, game: Game, task: Task, agent: int, prompts: Prompts
) -> Situation:
    """Turn 2 or later of a game of two, after random answers."""
    mode, prompts_N = PartnersAnswer(prompts), prompts.first(task, 2)
    past: list[Exchange] = []
    drawn: tuple[str, ...] = ()
    for turn in range(1, rng.choice(TURNS)):
        drawn = tuple(rng.choice(game.legal(task, i, 2)) for i in range(2))
        past.append(Exchange(prompts_N[agent], drawn[agent]))
        (prompts_N,) = mode([Attempt(task, drawn, Score(0.0), turn)])
    history: Literal["full", "last"] = "last" if rng.random() < LAST_ONLY else "full"
    messages = next_prompt(past, prompts_N[agent], history=history)
    partner, private = drawn[1 - agent], _private_texts(task, agent, 2)
    contents = (*private, partner, drawn[agent], " ".join((*private, partner)))
    return Situation(plain_text(messages), game.legal(task, agent, 2), contents)


def _private_texts(task: Task, agent: int, count: int) -> tuple[str, ...]:
    """Return what this agent knows from its own prompt."""
    row = task.fields
    if "symbol" in row:
        return (row["symbol"],) if agent == 0 else ("",)
    if "numbers" in row:
        return (str(row["numbers"][agent]),) if agent < count - 1 else ("",)
    if "secrets" in row:
        return (str(row["secrets"][agent]),)
    return (str(agent) if row.get("numbered") else "",)


Row = dict[str, object]


def _codebook(rng: random.Random) -> Row:
    symbols = list(SYMBOLS[: rng.choice((2, 3, 4, 6, 8, 12, 16, 16))])
    return {"symbols": symbols, "symbol": rng.choice(symbols), "letters": rng.choice((1, 2, 2, 3))}


def _shards(rng: random.Random) -> Row:
    question = rng.choice(QUESTIONS)
    draw = rng.choices if question == "pair" else rng.sample
    return {"numbers": draw(NUMBERS, k=8), "question": question}


ROWS: dict[str, Callable[[random.Random], Row]] = {
    "arena-codebook": _codebook,
    "arena-shards": _shards,
    "arena-lock": lambda rng: {"secrets": [rng.randrange(3), rng.randrange(3)]},
    "arena-chores": lambda rng: {"numbered": rng.random() < 0.5},
}
