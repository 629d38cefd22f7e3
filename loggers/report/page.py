"""The template of all reports: one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from comlrl.loggers.report.charts import Section
from comlrl.loggers.report.sample_episodes import code_css
from comlrl.loggers.views.view import View

HERE, TEMPLATE = Path(__file__).parent, "report_template.html"


def page(
    *,
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    view: View | None = None,
    **values: Any,
) -> str:
    """Fill in the template; parts without a value are left out.

    ``view``: the view that renders a run's episodes. ``values``: any of the template's variables
    ``tiles``, ``key``, ``episodes``, ``numbers``, ``config``, ``environment``, ``summary``.
    """
    from comlrl.loggers.report.pictures import NARROW, WIDE, svg

    parts = {
        "Episodes": ("episodes",),
        "Numbers": ("numbers",),
        "The run": ("config", "environment", "summary"),
    }
    rest = [name for name, keys in parts.items() if any(values.get(key) for key in keys)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([HERE, HERE.parent / "views"]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        view=view or View(),
        contents=[*(section.title for section in sections), *rest],
        light_code=code_css([".code"], "friendly"),
        dark_code=code_css([".code"], "github-dark"),
        svg=svg,
        narrow=NARROW,
        wide=WIDE,
        **values,
    )
