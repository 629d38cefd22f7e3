"""What is built in: problems, posts and the tiny-coder models, and where they lie."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

# Ordinary transformers model folders; the second is the first, trained on with longer problems.
TINY_CODER, TINY_CODER_LONG = _HERE / "tiny_coder", _HERE / "tiny_coder_long"
MODELS: dict[str, Path] = {  # by ``agent_model.name``
    "builtin:tiny-coder": TINY_CODER,
    "builtin:tiny-coder-long": TINY_CODER_LONG,
}
DATASETS: dict[str, dict[str, Path]] = {  # by ``dataset.name``: split → file
    f"builtin:{name}": {s: _HERE / name.replace("-", "_") / f"{s}.jsonl" for s in ("train", "eval")}
    for name in ("coopmini", "coopmini-long", "posts")
}
COOPMINI, COOPMINI_LONG, POSTS = DATASETS.values()
