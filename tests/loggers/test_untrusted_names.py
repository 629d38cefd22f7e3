"""Names from outside on a terminal and in Markdown; W&B that fails; a report of damaged files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rich.console import Console

from comlrl.loggers import weights_and_biases
from comlrl.loggers.console import ConsoleLogger
from comlrl.loggers.tables import code, plain, table
from comlrl.loop.progress import Progress
from comlrl.rewards.code.domain import CODE
from tests.support.made_runs import record, scored_tree, settings

HOSTILE = "a\x1b[31m|b\n| c | `d` \ud800\x07\u202e"


def test_a_cell_ends_neither_its_cell_nor_its_line():
    text = table([HOSTILE, "mean"], [[HOSTILE, HOSTILE], ["x", 0.5]])
    lines = text.splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert [line.replace("\\|", "").count("|") for line in lines] == [3] * 4
    assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}
    assert text.encode("utf-8")


@pytest.mark.parametrize("show", [plain, code])
def test_a_name_is_one_printable_line_of_bounded_length(show):
    assert show(HOSTILE).isprintable() and len(show("x" * 10_000)) < 400
    assert code(HOSTILE).count("`") == 2


def test_a_runs_title_sends_no_escape_sequences(tmp_path):
    console = Console(force_terminal=True, width=200, file=(tmp_path / "out").open("w+"))
    logger = ConsoleLogger(Progress(), title="run\x1b]0;pwned\x07\n\x1b[2J", console=console)
    logger.close()
    console.file.seek(0)
    shown = console.file.read()
    assert "run" in shown and "\x1b]0;" not in shown and "\x1b[2J" not in shown


def test_a_role_is_no_markup(tmp_path):
    columns = (("[/x] :x: reward", "reward_mean", "{:.2f}"),)
    for terminal in (False, True):
        with (tmp_path / "out").open("w+") as file:
            console = Console(force_terminal=terminal, width=200, file=file, color_system=None)
            logger = ConsoleLogger(Progress(), console=console, columns=columns)
            logger.log(record(1, reward_mean=1.0))
            logger.close()
            file.seek(0)
            assert "[/x] :x: reward" in file.read()


@pytest.mark.parametrize(
    "section",
    [
        {"project": "team/proj"},
        {"project": "a" * 200},
        {"project": "a:b#c"},
        {"project": "\ud800"},
        {"name": "x" * 5000, "project": "a?"},
        {"tags": ["t" * 100], "project": "p"},
        {"tags": [""], "project": "p"},
        {"dir": "FILE/below"},
    ],
)
def test_what_wandb_refuses_turns_it_off_with_a_notice(section, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    given = dict.fromkeys(("entity", "name", "dir")) | {"project": "p", "tags": []} | section
    given["mode"] = "offline"
    if given["dir"]:
        given["dir"] = str(tmp_path / "file" / "below")
    config = settings(wandb=SimpleNamespace(**given))
    logger = weights_and_biases.connect(
        config.wandb, config.to_dict(), CODE, tmp_path, resume=False
    )
    if logger is None:
        assert "W&B: off" in capsys.readouterr().err
    else:  # this version of wandb takes it
        logger.close()


class FailingRun:
    id = "r"

    def define_metric(self, *_: object, **__: object) -> None:
        return None

    def log(self, _: object) -> None:
        raise TypeError("a metric that it does not take")

    def finish(self) -> None:
        raise RuntimeError("the service is gone")


def test_wandb_that_fails_later_is_one_notice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(weights_and_biases.wandb, "init", lambda **_: FailingRun())
    (tmp_path / "wandb.json").write_text("[damaged")
    section = SimpleNamespace(
        project="p", entity=None, name=None, dir=None, tags=[], mode="offline"
    )
    held = settings().to_dict()
    logger = weights_and_biases.connect(section, held, CODE, tmp_path, resume=True)
    assert logger is not None
    logger.log(record(1))
    logger.log(record(2))
    logger.episodes(record(2, "eval"), [scored_tree("a", 1.0)])
    logger.close()
    assert capsys.readouterr().err.count("W&B") == 1
