"""HumanEval's rows, for the benchmarks that run its solutions."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HUB = "openai/openai_humaneval"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="HumanEval as JSON lines (default: the hub's)"
    )


def rows(data: Path | None) -> list[dict[str, Any]]:
    """One for each task, in order. Exits with one line where they cannot be had."""
    if data is not None:
        if not data.is_file():
            raise SystemExit(f"--data: '{data}' is no file; give HumanEval as JSON lines")
        return [json.loads(line) for line in data.read_text().splitlines()]
    from datasets import load_dataset

    try:
        return [dict(row) for row in load_dataset(HUB, split="test")]
    except Exception as error:  # the hub's many kinds
        raise SystemExit(
            f"--data: left out, and '{HUB}' cannot be read from the hub ({type(error).__name__}); "
            "give HumanEval as a file of JSON lines"
        ) from error
