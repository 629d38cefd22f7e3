"""A domain's name goes in, as it stands in ``domain.json``; how its runs are shown comes out."""

from __future__ import annotations

from comlrl.loggers.views.view import View


def view_of(domain: str | None) -> View:
    """Return a domain's view, or the default view, which shows all its measures."""
    if domain == "code":
        from comlrl.loggers.views.code import CODE

        return CODE
    return View()
