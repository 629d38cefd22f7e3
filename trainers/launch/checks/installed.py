"""Whether the packages of the loggers that a run asks for are installed. Light to import."""

from __future__ import annotations

import importlib.util

from comlrl.config.resolved import Config
from comlrl.errors import UserError


def check_installed(config: Config) -> None:
    """Raise UserError for a logger whose package is missing."""
    if config.trackio is not None and importlib.util.find_spec("trackio") is None:
        raise UserError("trackio: trackio is not installed; pip install 'comlrl[trackio]'")
