"""The arena's games, by their ``domain`` name."""

from __future__ import annotations

from rewards.arena.chores import CHORES_GAME
from rewards.arena.climbing import CLIMBING
from rewards.arena.codebook import CODEBOOK
from rewards.arena.dilemma import DILEMMA
from rewards.arena.game import Game
from rewards.arena.levers import LEVERS_GAME
from rewards.arena.lock import LOCK
from rewards.arena.shards import SHARDS

ARENA: dict[str, Game] = {
    game.name: game
    for game in (CODEBOOK, CLIMBING, SHARDS, LOCK, CHORES_GAME, LEVERS_GAME, DILEMMA)
}
