"""docs/configuration.md is what the dataclasses say."""

from __future__ import annotations

import pytest

from comlrl.config import algorithms as configs
from comlrl.config import sections
from comlrl.config.keys import keys_of
from tools.config_reference import FILE, reference

SECTIONS = {**sections.SECTIONS, **configs.SECTIONS}


def test_the_page_is_fresh():
    assert FILE.read_text(encoding="utf-8") == reference(), "run `python -m tools.config_reference`"


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_says_what_it_is(name):
    assert [key.name for key in keys_of(SECTIONS[name]).values() if not key.description] == []
