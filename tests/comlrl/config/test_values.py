"""Values that cannot be copied, printed or stored: refused in one line wherever they stand."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from comlrl.config.loader import Loader
from comlrl.config.yaml_values import parse_override
from comlrl.errors import UserError
from comlrl.trainers.launch.commands.command_line import sections_of
from comlrl.trainers.launch.commands.search import read_sweep

HUGE = "0x" + "f" * 4000
EIGHT = "[{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}]"
REPEATED = [f"&{new} {EIGHT.format(f'*{old}')}" for old, new in pairwise("abcdefghij")]
BOMB = f"[&a {EIGHT.format('x')}, {', '.join(REPEATED)}]"


KEYS = (
    "agents seed magrpo.learning_rate agent_model.name lora.target_modules magrpo.no_such_key "
    "agent_model.model_kwargs prompts.main agent_model reward_processor.enabled"
)


@pytest.mark.parametrize("key", KEYS.split())
@pytest.mark.parametrize(
    "value",
    [HUGE, f"[{HUGE}]", f"{{a: {HUGE}}}", f"{{? {HUGE} : a}}", "&a [*a]", "&a {b: *a}", BOMB],
)
def test_a_value_without_measure_is_refused_in_one_line(key, value, tmp_path):
    """In an override, and in a file."""
    section, _, name = key.partition(".")
    tree = f"{section}: {{{name}: {value}}}" if name else f"{section}: {value}"
    file = tmp_path / "run.yaml"
    file.write_text(tree + "\n", encoding="utf-8")
    if key != "prompts.main":  # a text, as it stands
        with pytest.raises(UserError, match=re.escape(section)) as caught:
            Loader("magrpo", sections_of("magrpo")).set(parse_override(f"{key}={value}"))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="--config"):
        Loader("magrpo", sections_of("magrpo")).read(file)


@pytest.mark.parametrize("value", [HUGE, "&a [*a]", BOMB])
def test_a_sweep_file_likewise(value, tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(f"method: {value}\n", encoding="utf-8")
    with pytest.raises(UserError, match="sweep file"):
        read_sweep(file)
