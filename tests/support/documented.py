"""What the pages of docs/ list: names of metrics, and programs given in full."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.runs import ALGORITHMS, ROOT

DOCS = ROOT / "docs" / "metrics.md"


@dataclass(frozen=True)
class Row:
    """A row of docs/metrics.md: a name, the prefixes that it may have, who logs it."""

    name: str
    turn: bool
    agent: bool
    who: frozenset[str] | None  # None: whoever has trees

    def pattern(self, prefix: str = r"(turn_\d+/)?(agent_\d+/)?") -> re.Pattern[str]:
        prefix = prefix if self.turn else prefix.replace(r"(turn_\d+/)?", "")
        prefix = prefix if self.agent else prefix.replace(r"(agent_\d+/)?", "")
        name = re.escape(self.name).replace("ROLE/KIND", r"(aux\d*|main)/\w+")
        return re.compile(prefix + name.replace("@K", r"@\d+"))


def documented() -> list[Row]:
    """The names of docs/metrics.md."""
    rows = []
    for line in DOCS.read_text(encoding="utf-8").split("## Other files")[0].splitlines():
        found = re.match(r"\| `([^`]+)` \|([^|]*)\|([^|]*)\|(.*\|)?", line)
        if found is None:
            continue
        who = None
        if found[4]:  # a fourth column: the third says who
            every, _, but = found[3].strip().lower().partition("all")
            names = {name.strip() for name in (every or but.replace(" but ", "")).split(",")}
            who = frozenset(names if every else {*ALGORITHMS} - names)
            assert who <= {*ALGORITHMS}, line
        rows.append(Row(found[1], "turn" in found[2], "agent" in found[2], who))
    return rows


def programs(page: str) -> dict[str, str]:
    """The files that a page gives in full: `` `name`: `` before a block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return dict(re.findall(r"`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```", text, re.M | re.S))
