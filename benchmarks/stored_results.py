"""Results that later calls read again are only read by calls with the same settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comlrl import files


def check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings into a folder of results, or end the program if others are there."""
    file = out / "settings.json"
    content = json.dumps(settings, indent=1, default=str) + "\n"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        files.replace(file, content)
    elif file.read_text(encoding="utf-8") != content:
        reason = f"{out} holds results of other settings; choose another --out"
        print(f"error: {reason}", file=sys.stderr)
        raise SystemExit(2)
