"""The embedded default: the CoopMini problems and the tiny-coder model, and where they lie."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

TINY_CODER: Path = _HERE / "tiny_coder"  # an ordinary transformers model folder
COOPMINI: dict[str, Path] = {
    split: _HERE / "coopmini" / f"{split}.jsonl" for split in ("train", "eval")
}
