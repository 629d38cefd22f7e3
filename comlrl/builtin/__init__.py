"""What is built in: problems, posts and the tiny-coder model, and where they lie."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

TINY_CODER: Path = _HERE / "tiny_coder"  # an ordinary transformers model folder
DATASETS: dict[str, dict[str, Path]] = {  # by ``dataset.name``: split → file
    f"builtin:{name}": {s: _HERE / name / f"{s}.jsonl" for s in ("train", "eval")}
    for name in ("coopmini", "posts")
}
COOPMINI, POSTS = DATASETS["builtin:coopmini"], DATASETS["builtin:posts"]
