"""The tool that prints what agents read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from comlrl.builtin import TINY_CODER
from tools import show_prompts

ROW = {
    "task_id": "T/0",
    "prompt": "def pick(n):\n    '''Twice n.'''\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
    "entry_point": "pick",
}


Show = Callable[..., tuple[str, str]]


@pytest.fixture
def show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Show:
    """The tool, called in a folder with a row and an answer to it: its output and its errors."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "aux.py").write_text("def aux(n):\n    return n\n")
    (tmp_path / "main.py").write_text("def pick(n):\n    m = aux(n)\n    return m + 1\n")
    monkeypatch.chdir(tmp_path)

    def shown(*options: str, code: int = 0) -> tuple[str, str]:
        found = show_prompts.main(["--override", "dataset.name=rows.jsonl", *options])
        output, errors = capsys.readouterr()
        assert found == code, errors
        return output, errors

    return shown


def test_every_mode_is_printed_for_every_agent_and_turn(show: Show) -> None:
    modes = ("level_feedback", "level_passed", "passed", "plain")
    shown, _ = show("--completions", "aux.py", "main.py", "--mode", *modes)
    # 0.4 + 0.6 + 0.5 for both definitions and syntax; 3 + 1 ≠ 6, so no test and no aux terms.
    assert "reward of turn 1: 1.50" in shown
    for mode in modes:
        for turn in (1, 2):
            for role in ("aux", "main"):  # the keys of `prompts`
                assert f"════ {mode} · turn {turn} · {role}\n" in shown
    assert "Failed: assert pick(3) == 6\n" in shown
    assert "`aux`: used.\nWrite a revised `pick`, code only" in shown


def test_a_configurations_own_prompts_are_printed(show: Show) -> None:
    own = ["prompts.system=Be short.", "prompts.aux={problem} Help {entry_point}."]
    shown, _ = show(*own, "prompts.revision=Once more, {name}.")
    assert "turn 1 · aux\nBe short.\n\ndef pick(n):" in shown
    assert "Help pick.\n\n" in shown and "turn 2" not in shown
    own += ["prompts.revision=Once more, {name}.", "--mode", "passed", "--completions"]
    shown, _ = show(*own, "aux.py", "main.py")
    assert "level" in shown and "\nOnce more, pick.\n\n" in shown


def test_agents_in_order_are_shown_with_what_they_read(show: Show) -> None:
    shown, _ = show("magrpo.turn_order=sequential", "--completions", "aux.py", "main.py")
    first, second = shown.split("· turn 2 · aux")
    assert first.count("def aux(n):\n    return n\n```\n\nWrite `def pick(n):`") == 1
    assert second.count("```\ndef aux(n):") == 1  # main's own past; its present is not known yet
    assert second.rstrip().endswith("(the texts of the agents before it in this turn come here)")


def test_a_task_that_is_not_there_is_one_line(show: Show) -> None:
    _, errors = show("--task", "7", "--completions", "aux.py", "main.py", code=2)
    assert errors == "error: --task: '7' is not among the 1 rows of the split\n"


TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|system|>You help.\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
)


def test_the_chat_template_is_shown_with_the_system_message_that_it_adds(
    show: Show, tmp_path: Path
) -> None:
    shutil.copytree(TINY_CODER, tmp_path / "chat")
    file = tmp_path / "chat" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    own = ["agent_model.name=chat", "prompts.aux={problem} Help.", "prompts.main=Write {name}."]
    shown, _ = show(*own)
    assert shown == (
        "════ level_feedback · turn 1 · aux\n<|system|>You help.\n<|user|>def pick(n):\n"
        "    '''Twice n.''' Help.\n<|assistant|>```python\ndef aux(n):\n"
        "════ level_feedback · turn 1 · main\n<|system|>You help.\n"
        "<|user|>Write pick.\n<|assistant|>```python\ndef pick(n):\n"
    )
    shown, _ = show(*own, "prompts.system=Be short.")
    assert "aux\n<|system|>Be short.\n<|user|>def" in shown and "You help" not in shown


DOMAIN = """
from comlrl.types import Domain, Task
from comlrl.rewards.code.reward import CodeReward

class Mine(Domain):
    fields, revision, reward = ("text",), "Again.", CodeReward
    def task(self, name, row): return Task(name, row)
    def roles(self, num_agents): return ("aux", "main")
    def templates(self, num_agents): return ("{text}", "{text}")
    def values(self, task, num_agents): return [{}, {}]
    def problem(self, task): return ""
"""


def test_a_domain_of_ones_own_that_fails_is_one_line(show: Show, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DOMAIN)
    (tmp_path / "c.yaml").write_text("domain: 'mine:Mine'\nmagrpo: {}\n")
    _, errors = show("--config", "c.yaml", code=2)
    notice, error = errors.splitlines()
    assert notice.startswith("notice: prompts of")
    assert error.startswith("error: domain: 'mine:Mine' returned no `text` for task 'T/0'")
