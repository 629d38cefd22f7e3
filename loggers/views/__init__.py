"""Lookup of a domain's view by the name in ``domain.json``."""

from __future__ import annotations

from comlrl.loggers.views.view import View


def view_of(domain: str | None) -> View:
    """Return a domain's view, or the default view, which shows all measures."""
    if domain == "code":
        from comlrl.loggers.views.code import CODE

        return CODE
    return View()
