"""``domain: arena-codebook``: can two agents invent a code?

The speaker reads one of S symbols and writes a message of m letters from an alphabet of A = 4. The
listener reads only that message and names the symbol. The reward is 1 if the symbol is right, else
0. The listener sees the message only with ``turn_order: sequential``; in simultaneous turns no
policy beats the floor. Codes that share a message among several symbols (pooling) are local optima.

Rows have ``symbols`` (all S), ``symbol`` (the one that the speaker reads) and ``letters`` (m).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from comlrl.rewards.arena.game import WORD, Bounds, Game, GameReward
from comlrl.types import JointAction, Task

ALPHABET = "ABCD"
SPEAKER = """\
You are the speaker. The symbol is {symbol}.
The listener reads only your message and must name the symbol.
Write {letters} and nothing else.
"""
LISTENER = """\
You are the listener. Name the symbol that the speaker read.
Write one word: {symbols}.
"""


def floor(symbols: int) -> float:
    """Return 1/S: without a message, a listener cannot do better than naming a fixed symbol."""
    return 1 / symbols


def optimum(symbols: int, letters: int) -> float:
    """Return min(1, A^m / S): each message can name one symbol, and S messages are enough."""
    return min(1.0, len(ALPHABET) ** letters / symbols)


def messages(letters: int) -> tuple[str, ...]:
    """Return all messages of m letters."""
    return tuple(map("".join, itertools.product(ALPHABET, repeat=letters)))


class CodebookReward(GameReward):
    """1 if the listener names the speaker's symbol and both answers are legal, else 0."""

    def value(self, action: JointAction) -> float:
        message, named = CODEBOOK.answers(action)
        return float(message is not None and named == action.task.fields["symbol"])


class Codebook(Game):
    """A speaker and a listener."""

    name = "arena-codebook"
    fields = ("symbol", "symbols", "letters")
    reward = CodebookReward

    def check_row(self, row: Mapping[str, Any]) -> None:
        symbols = row.get("symbols")
        if not isinstance(symbols, list) or not all(
            isinstance(symbol, str) and WORD.fullmatch(symbol) for symbol in symbols
        ):
            raise ValueError("its field `symbols` is not a list of words (letters and digits)")
        if len(set(symbols)) != len(symbols) or len(symbols) < 2:
            raise ValueError("its field `symbols` does not contain two or more different words")
        if row.get("symbol") not in symbols:
            raise ValueError("its field `symbol` is not one of `symbols`")
        letters = row.get("letters")
        if type(letters) is not int or not 1 <= letters <= 3:
            raise ValueError("its field `letters` is not 1, 2 or 3")

    def role_names(self, num_agents: int) -> tuple[str, ...]:
        return ("speaker", "listener")

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return (SPEAKER, LISTENER)

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        symbols, letters = ", ".join(task.fields["symbols"]), task.fields["letters"]
        length = "one letter A, B, C or D" if letters == 1 else f"{letters} letters A, B, C or D"
        shared = {"symbols": symbols, "letters": length}
        return ({**shared, "symbol": task.fields["symbol"]}, {**shared, "symbol": "unknown"})

    def legal(self, task: Task, agent: int, num_agents: int) -> tuple[str, ...]:
        if agent == 0:
            return messages(task.fields["letters"])
        return tuple(task.fields["symbols"])

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        return f"The message: {self.answer(task, 0, num_agents, written[0])}\n"

    def bounds(self, task: Task, num_agents: int, num_turns: int, reward: Any) -> Bounds:
        symbols = len(task.fields["symbols"])
        return Bounds(floor(symbols), optimum(symbols, task.fields["letters"]))

    def greatest_reward(self, num_agents: int) -> float | None:
        return 1.0


CODEBOOK = Codebook()
