"""Built-in problems, posts, arena rows and tiny models, and their paths."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

# Ordinary transformers model folders; the second plays the arena's games at random.
TINY_CODER, TINY_PLAYER = _HERE / "tiny_coder", _HERE / "tiny_player"
MODELS: dict[str, Path] = {  # by ``agent_model.name``
    "builtin:tiny-coder": TINY_CODER,
    "builtin:tiny-player": TINY_PLAYER,
}
DATASETS: dict[str, dict[str, Path]] = {  # by ``dataset.name``: split → file
    f"builtin:{name}": {s: _HERE / name.replace("-", "_") / f"{s}.jsonl" for s in ("train", "eval")}
    for name in ("coopmini", "coopmini-long", "posts")
}
COOPMINI, COOPMINI_LONG, POSTS = DATASETS.values()
_FUNCTIONS = ("train", "eval", "transfer")
FUNCTIONS = {split: _HERE / "functions" / f"{split}.jsonl" for split in _FUNCTIONS}
FUNCTIONS_STARTER = {s: _HERE / "functions_starter" / f"{s}.jsonl" for s in ("train", "eval")}
LEVELS = {  # dataset → the levels of its rows in the files of all levels
    "builtin:functions": ("easy", "medium"),
    "builtin:functions-easy": ("easy",),
    "builtin:functions-medium": ("medium",),
    "builtin:functions-hard": ("hard",),
}
DATASETS |= dict.fromkeys(LEVELS, FUNCTIONS)
DATASETS["builtin:functions-starter"] = FUNCTIONS_STARTER
DATASETS |= {  # the arena's games
    f"builtin:arena-{game}": {s: _HERE / "arena" / f"{game}_{s}.jsonl" for s in ("train", "eval")}
    for game in ("codebook", "climbing", "shards", "lock", "chores", "levers", "dilemma")
}
