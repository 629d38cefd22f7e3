"""The exit code of the tool that compares the numbers of runs."""

from __future__ import annotations

import json
import sys

import pytest

from tools import freeze

SAME = {"reward": "0x1p+0"}


@pytest.fixture
def code(tmp_path, monkeypatch):
    """Return the exit code with these numbers now and before."""

    def called(now: dict, before: dict | None = None, *arguments: str) -> int:
        monkeypatch.setattr(freeze, "Zygote", lambda: None)
        monkeypatch.setattr(freeze, "runs", lambda quick: [(n, n, "", 1) for n in now])
        monkeypatch.setattr(freeze, "numbers", lambda zygote, config, *_: now[config])
        argv = ["freeze.py", str(tmp_path / "now.json"), *arguments]
        if before is not None:
            (tmp_path / "before.json").write_text(json.dumps(before))
            argv += ["--against", str(tmp_path / "before.json")]
        monkeypatch.setattr(sys, "argv", argv)
        return freeze.main()

    return called


def test_equal_numbers_are_a_success(code):
    assert code({"ppo": SAME}) == code({"ppo": SAME}, {"ppo": SAME}) == 0
    assert code({"ppo": SAME}, {"ppo": {"reward": "0x0p+0"}}) == 1


def test_a_failed_run_is_none(code):
    failed = {"ppo": {"exit codes": "[1]"}}
    assert code(failed) == code(failed, failed) == 1


def test_a_missing_run_is_none_unless_it_was_not_asked_for(code):
    before = {"ppo": SAME, "grpo": SAME}
    assert code({"ppo": SAME}, before) == 1
    assert code({"ppo": SAME}, before, "--only", "^ppo") == 0


def test_no_run_at_all_is_an_error(code, capsys):
    with pytest.raises(SystemExit) as ended:
        code({"ppo": SAME}, None, "--only", "pppo")
    assert ended.value.code == 2 and "pppo" in capsys.readouterr().err
