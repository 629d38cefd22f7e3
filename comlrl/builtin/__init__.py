"""The embedded default: the CoopMini problems and the tiny-coder model, and where they lie."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

TINY_CODER: Path = _HERE / "tiny_coder"  # an ordinary transformers model folder
DATASETS: dict[str, dict[str, Path]] = {  # by the name that a configuration gives: split → file
    "builtin:coopmini": {s: _HERE / "coopmini" / f"{s}.jsonl" for s in ("train", "eval")},
}
COOPMINI = DATASETS["builtin:coopmini"]
