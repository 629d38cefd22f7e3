"""``module:NAME``: found beside the YAML first, apart from other runs'; errors take one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from comlrl.config.plugins import modules as user_modules
from comlrl.config.plugins.arguments import keywords
from comlrl.config.plugins.targets import TargetError, check_methods, load
from comlrl.errors import UserError
from comlrl.types import Reward
from tests.support.processes import python

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Files into a folder; what was imported from it is forgotten afterwards."""

    def make(folder: str = "a", **files: str) -> Path:
        for name, text in files.items():
            file = tmp_path / folder / (name.replace("__", "/").replace("INIT", "__init__") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / folder

    yield make
    user_modules.forget()


def refusal(value: str, folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        load("reward.target", value, folder)
    text = str(raised.value)
    assert text.startswith(f"reward.target: '{value}'") and "\n" not in text
    return text.removeprefix(f"reward.target: '{value}'").replace(str(folder), "HERE")


# ------------------------------------------------------------------------------------- loading


def test_a_module_beside_the_file_and_the_siblings_that_it_imports(write):
    folder = write(
        mine="import words, pack\nclass R:\n  def n(self):\n    import late\n    return late.N\n",
        words="from pack.inner import DEEP\nN = DEEP",
        late="N = 5",
        pack__inner="from . import beside\nDEEP = beside.DEEP",  # no __init__.py
        pack__beside="DEEP = 3",
        other="raise SystemExit('nobody imports me')",
    )
    target = load("reward.target", "mine:R", folder)
    assert target.obj().n() == 5
    names = ["mine.py", "pack/beside.py", "pack/inner.py", "words.py"]
    assert [source.name for source in target.sources] == names
    assert all(source.beside for source in target.sources)
    assert not list(folder.glob("pack/__pycache__"))


def test_two_folders_with_modules_of_one_name(write):
    write("a", mine="import words\nV = words.V", words="V = 1")
    write("b", mine="import words\nV = words.V", words="V = 2")
    found = [load("domain", "mine:V", write(name)).obj for name in ("a", "b", "a")]
    assert found == [1, 2, 1]


def test_a_process_keeps_what_it_first_read(write):
    folder = write(mine="class A: x = 1\nclass B: pass")
    first = load("domain", "mine:A", folder)
    write(mine="class A: x = 2\nclass B: pass")
    again = load("reward.target", "mine:B", folder)  # one module for both
    assert again.sources == first.sources
    assert load("domain", "mine:A", folder).obj is first.obj


def test_beside_the_file_comes_before_the_python_path(write, monkeypatch):
    monkeypatch.syspath_prepend(str(write("path", mine="V = 'path'", only="V = 'path'")))
    folder = write("a", mine="V = 'beside'")
    assert load("domain", "mine:V", folder).obj == "beside"
    target = load("domain", "only:V", folder)
    assert target.obj == "path" and not target.sources[0].beside
    assert target.sources[0].name == "only.py"
    del sys.modules["only"]


def test_a_sibling_never_takes_a_name_of_pythons_or_of_this_project(write):
    folder = write(mine="import json\nV = json.dumps(1)", json="", comlrl="")
    assert load("domain", "mine:V", folder).obj == "1"
    assert "`json`; rename that in HERE" in refusal("json:V", folder)
    write(other="import this", this="")  # of Python, and not imported by now
    assert "`this`; rename that in HERE" in refusal("other:V", folder)
    assert "this" not in sys.modules
    write(torch="")  # loaded already, or not: it is what the project stands on
    assert sys.modules.get("torch") is None or "rename" in refusal("torch:V", folder)


def test_classes_can_be_pickled_by_name(write):
    import pickle

    folder = write(mine="class Facts:\n    def __init__(self): self.n = 4")
    facts = load("domain", "mine:Facts", folder).obj()
    assert pickle.loads(pickle.dumps(facts)).n == 4


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        ("mine", " is not of the form module:NAME, e.g. my_work:Mine"),
        ("mine.R", " is not of the form"),
        ("mine:", " is not of the form"),
        ("../mine:R", " is not of the form"),
        ("mind:R", r": there is no module `mind` beside the YAML file, .*did you mean `mine`\?"),
        ("mine.deep:R", ": there is no module `mine.deep`"),
        ("mine:Rewrd", r": `mine` has no `Rewrd`; did you mean `Reward`\?"),
        ("mine:zzz", ": `mine` has no `zzz`; there are Reward, x"),
        ("div:R", r": importing it raised ZeroDivisionError: division by zero \(HERE/div.py:2\)"),
        ("gone:R", r": importing it raised ModuleNotFoundError: No module named 'nowhere' .*:1\)"),
        ("bad:R", r": importing it raised SyntaxError: .* \(HERE/bad.py:2\)"),
        ("out:R", r": importing it raised SystemExit: 3 \(HERE/out.py:2\)"),
        ("sub:R", r": importing it raised KeyError: 'a' \(HERE/low.py:1\)"),
    ],
)
def test_what_cannot_be_loaded_is_reported_in_a_line(value, pattern, write):
    folder = write(
        mine="class Reward: pass\nx = 1",
        div="\n1 / 0",
        gone="import nowhere",
        bad="x = 1\ndef f(:\n",
        out="import sys\nsys.exit(3)",
        sub="import low",
        low="{}['a']",
    )
    assert re.match(pattern, refusal(value, folder))


def test_an_import_that_failed_works_once_it_is_mended(write):
    folder = write(mine="import words", words="1 / 0")
    refusal("mine:V", folder)
    write(words="V = 1", mine="from words import V")
    assert load("domain", "mine:V", folder).obj == 1


# ------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ("pass", r"has no method `score\(actions\)`; add it"),
        ("score = 3", r"its `score` is 3; write a method `score\(actions\)`"),
        ("def score(self): pass", r"its `score` is not called as score\(actions\): too many"),
        (
            "def score(self, a, b): pass",
            r"its `score` is not called as score\(actions\): missing",
        ),
    ],
)
@pytest.mark.parametrize("base", ["", "(Reward)"])
def test_lacking_methods(body, pattern, base, write):
    header = f"from comlrl.types import Reward\nclass R{base}:\n    {body}\n"
    target = load("reward.target", "mine:R", write(mine=header))
    with pytest.raises(UserError, match=rf"reward.target: 'mine:R':? {pattern}"):
        check_methods(target, Reward, ["score"])


@pytest.mark.parametrize(
    "body",
    [
        "def score(self, actions): pass",
        "def score(self, joint, more=1): pass",
        "@staticmethod\n    def score(actions): pass",
        "@classmethod\n    def score(cls, *a): pass",
    ],
)
def test_methods_that_are_there(body, write):
    folder = write(mine=f"class R:\n    {body}\nmade = R()\n")
    for name in ("R", "made"):
        check_methods(load("reward.target", f"mine:{name}", folder), Reward, ["score"])


def test_what_the_users_code_raises_is_reported_with_its_place(write):
    folder = write(mine="import json\ndef f(x):\n    return json.loads(x)\n")
    target = load("domain", "mine:f", folder)
    with pytest.raises(TargetError) as raised, target.calling():
        target.obj("{")
    assert re.fullmatch(
        rf"domain: 'mine:f' raised JSONDecodeError: Expecting .* \({folder}/mine.py:3\)",
        str(raised.value),
    )
    with pytest.raises(UserError, match="as it is"), target.calling():
        raise UserError("as it is")


# ----------------------------------------------------------------------------------- arguments


class Given:
    def __init__(
        self,
        workers: int | None = None,
        *,
        bonus: Literal["any_test", "share"] = "any_test",
        cost: float = 0.0,
        least: int | None = None,
        strict: bool = False,
        name: str = "",
        words: list[str] | None = None,
        free=0,
    ) -> None:
        self.given = locals()


OFFERED = {"workers": 2, "timeout": 3.0}


def test_arguments_and_what_is_offered():
    arguments = {"cost": 1, "least": None, "words": ["a"], "free": {"a": 1}}
    given = keywords(Given, "reward.arguments", arguments, OFFERED, "sandbox")
    assert {n: given[n] for n in arguments} == arguments and given["workers"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bonsu": "share"}, "bonsu: unknown argument, set to 'share'; did you mean `bonus`?"),
        (
            {"zzzz": 1},
            "zzzz: unknown argument, set to 1; there are bonus, cost, least, strict, name, words, "
            "free",
        ),
        ({"workers": 4}, "workers: 4; this argument comes from sandbox: set it there"),
        ({"timeout": 4}, "timeout: unknown argument, set to 4; there are bonus, "),
        ({"bonus": 1}, "bonus: 1 is not valid; use any_test or share"),
        ({"bonus": None}, "bonus: None is not valid; use any_test or share"),
        ({"strict": 1}, "strict: 1 is not valid; use true or false"),
        ({"cost": "1"}, "cost: '1' is not valid; use a number"),
        ({"cost": True}, "cost: True is not valid; use a number"),
        ({"cost": float("inf")}, "cost: inf is not valid; use a number"),
        ({"least": 1.5}, "least: 1.5 is not valid; use a whole number or null"),
        ({"name": 3}, "name: 3 is not valid; use a text"),
        ({"words": "a"}, "words: 'a' is not valid; use a list of texts or null"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(UserError) as raised:
        keywords(Given, "reward.arguments", arguments, OFFERED, "sandbox")
    assert str(raised.value).startswith(f"reward.arguments.{message}")


def test_a_missing_argument():
    class Needs:
        def __init__(self, prompts, least: int): ...

    with pytest.raises(UserError, match=r"reward\.arguments\.least: missing, and Needs cannot be"):
        keywords(Needs, "reward.arguments", {}, {"prompts": 1}, "sandbox")


def test_targets_are_without_torch():
    modules = "comlrl.config.plugins.targets, comlrl.config.plugins.arguments"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"
