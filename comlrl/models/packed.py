"""Models in one GGUF file, llama.cpp's format with tokenizer and chat template. Light to import."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from comlrl.errors import UserError


def is_packed(name: str) -> bool:
    return name.endswith(".gguf")


def check_packed(key: str, name: str) -> None:
    """Raises UserError where a GGUF file is not there, or nothing that reads it."""
    if not Path(name).is_file():
        raise UserError(f"{key}: '{name}' does not exist; give a GGUF file that does")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"{key}: '{name}' is read with the package gguf; pip install 'comlrl[gguf]'"
        )


def source_of(file: str) -> tuple[str, dict[str, str]]:
    """A GGUF file as ``from_pretrained`` takes it: its folder, and its name there."""
    return str(Path(file).parent), {"gguf_file": Path(file).name}
