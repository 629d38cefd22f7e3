"""The site of `make docs`: every page, a reference of every package, nothing from the network;
and a broken link fails it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "mkdocs.yml"

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))),
    reason="needs the extra `docs`: make docs",
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    # without --quiet, which would hide the warnings from --strict too
    command = [sys.executable, "-m", "mkdocs", "build", "-f", config, "-d", site]
    return subprocess.run(command, capture_output=True, text=True, cwd=config.parent, env=env)


def test_the_site_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    done = build(CONFIG, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("*.html")}
    assert pages >= {
        page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        for page in (ROOT / "docs").rglob("*.md")
    }
    assert pages >= {f"reference/{name}.html" for name in ("comlrl.credit", "comlrl.trainers")}
    assert "λ A_{l+1}" in (tmp_path / "reference/comlrl.credit.html").read_text()  # gae's equation
    loaded = r'<script[^>]*\ssrc="([^"]*)"|<link[^>]*rel="stylesheet"[^>]*href="([^"]*)"'
    loaded += r'|<img[^>]*\ssrc="([^"]*)"'
    for page in pages:
        found = re.findall(loaded, (tmp_path / page).read_text(encoding="utf-8"))
        assert found and [x for x in found if "//" in "".join(x)] == [], page
    styles = "".join(file.read_text() for file in tmp_path.rglob("*.css"))
    assert not re.search(r"url\([\"']?(https?:)?//", styles)


@pytest.mark.parametrize("link", ["none.md", "other.md#none", "../Makefile"])
def test_a_broken_link_fails(tmp_path: Path, link: str) -> None:
    head, rest = CONFIG.read_text().split("\nnav:\n")
    rules = rest[rest.index("\nmarkdown_extensions:") :]
    head = re.sub(r"\n(extra|hooks):.*", "", head, flags=re.S)
    (tmp_path / "mkdocs.yml").write_text(head + "\n" + rules)
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "other.md").write_text("# Other\n\n## One\n")
    (pages / "index.md").write_text("# Index\n\n[one](other.md#one)\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    (pages / "index.md").write_text(f"# Index\n\n[one]({link})\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1 and link.split("#")[-1] in done.stderr, done.stderr
