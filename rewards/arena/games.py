"""The arena's games, by their ``domain`` name."""

from __future__ import annotations

from comlrl.rewards.arena.chores import CHORES_GAME
from comlrl.rewards.arena.climbing import CLIMBING
from comlrl.rewards.arena.codebook import CODEBOOK
from comlrl.rewards.arena.dilemma import DILEMMA
from comlrl.rewards.arena.game import Game
from comlrl.rewards.arena.levers import LEVERS_GAME
from comlrl.rewards.arena.lock import LOCK
from comlrl.rewards.arena.shards import SHARDS

ARENA: dict[str, Game] = {
    game.name: game
    for game in (CODEBOOK, CLIMBING, SHARDS, LOCK, CHORES_GAME, LEVERS_GAME, DILEMMA)
}
