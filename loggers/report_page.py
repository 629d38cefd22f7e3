"""The template of all reports: one page with everything inside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from loggers.report_charts import Section
from loggers.report_episodes import code_css, python

TEMPLATE = "report_template.html"


def page(*, title: str, subtitle: str, sections: Sequence[Section], **values: Any) -> str:
    """Fill the template; what a page does not have is left out."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["python"] = python
    return environment.get_template(TEMPLATE).render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        light_code=code_css([".code"], "friendly"),
        dark_code=code_css([".code"], "github-dark"),
        **values,
    )
