"""docs/configuration.md is what the dataclasses say."""

from __future__ import annotations

import dataclasses
import re

import pytest

from comlrl.config import algorithms as configs
from comlrl.config import sections
from comlrl.config.keys import in_words, keys_of
from tools.config_reference import FILE, reference

SECTIONS = {**sections.SECTIONS, **configs.SECTIONS}


def test_the_page_is_fresh():
    assert FILE.read_text(encoding="utf-8") == reference(), "run `python -m tools.config_reference`"


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_says_what_it_is(name):
    assert [key.name for key in keys_of(SECTIONS[name]).values() if not key.description] == []


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_stands_on_the_page_once_a_section(name):
    page = reference()
    own = re.split(rf"^## `{name}`$", page, flags=re.MULTILINE)[1].split("\n## ")[0]
    common = re.split(r"^## Algorithms.*$", page, flags=re.MULTILINE)[1].split("\n## ")[0]
    for field in dataclasses.fields(SECTIONS[name]):
        row = f"| `{field.name}` |"
        assert own.count(row) == 1 or (name in configs.SECTIONS and common.count(row) == 1)


def test_defaults_of_an_algorithm_that_differ_are_listed_again():
    shppo = reference().split("## `shppo`")[1].split("\n## ")[0]
    assert (
        "| `discount` | number; at least 0 and at most 1 | `0.95` | between turns |" in shppo
    )  # common: 0.9
    assert "| `learning_rate` |" not in shppo  # as everywhere


def test_descriptions_are_the_key_s_own_or_the_parent_s():
    magrpo, wandb = keys_of(configs.MAGRPOConfig), keys_of(sections.WandbConfig)
    assert magrpo["advantage_normalization"].description.startswith("divide by the siblings'")
    assert magrpo["advantage"].description.endswith(
        "return of a greedy rollout, or none"
    )  # two lines
    assert keys_of(configs.SHPPOConfig)["discount"].description == "between turns"
    assert in_words(wandb["mode"].annotation, "`") == [
        "`online`", "`offline`", "`disabled`", "null"
    ]  # fmt: skip
    assert wandb["tags"].default == [] and wandb["entity"].default is None
