"""README and docs: every command runs, every link and file is there, every key exists.

Train commands run with ``--dry-run``, evaluations and reports on small runs made here; what takes
minutes or needs an account is checked as far as its arguments and files go.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from comlrl.config.algorithms import SECTIONS, sections_of
from comlrl.config.loader import ALIASES, Loader
from comlrl.config.sections import SECTIONS as SHARED
from comlrl.config.sections import Root
from comlrl.config.yaml_values import Setting
from comlrl.errors import UserError
from comlrl.rollout.checked import METHODS
from comlrl.tasks.prompts import Prompts
from comlrl.trainers.launch.commands import export
from comlrl.trainers.launch.commands.train import main as train_main
from comlrl.trainers.launch.wiring.resolved_work import NEEDED
from comlrl.types import Domain, JointAction
from tests.support import processes
from tests.support.documented import programs

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EVERY_SECTION = {**SHARED, **SECTIONS}
# What is not ours: known to be there, or for the reader's machine.
OUTSIDE = {"wandb", "transformers", "pip", "cd", "export", "git", "tail", "env/bin/pip", "docker"}
OUTSIDE |= {".venv/bin/pip", "env/bin/vllm", "env/bin/python", "python3.11", "."}


class Command(NamedTuple):
    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:80]}"


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and text of each block; one that is indented has the language ``indented``."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        yield language, body
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for body in re.findall(r"(?<=\n\n)((?: {4}[^\n]*\n)+)", prose):
        yield "indented", re.sub(r"^ {4}", "", body, flags=re.M)


def commands() -> list[Command]:
    found = []
    for page in PAGES:
        for language, body in blocks(page.read_text(encoding="utf-8")):
            lines = body.replace("\\\n", " ").splitlines()
            shell = language in ("bash", "sh", "console") or any(
                re.match(r"(python|make|torchrun) ", line) for line in lines
            )
            for line in lines if shell and language != "python" else ():
                words = shlex.split(line, comments=True)
                if words:
                    found.append(Command(page.relative_to(ROOT).as_posix(), tuple(words)))
    return found


COMMANDS = commands()
DISTINCT = list({command.words: command for command in COMMANDS}.values())
# The run directories that evaluations, reports and warm starts of the pages read.
READ_RUNS = {
    match[1]
    for command in DISTINCT
    for word in command.words
    if (match := re.fullmatch(r"(?:\d=|init_from=)?((?:runs|outputs)/[\w.]+)", word))
    and (word.startswith("init_from=") or {"evaluate.py", "report"} & set(command.words))
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder: the repository's files and those that pages give in full."""
    folder = tmp_path_factory.mktemp("docs")
    for path in ROOT.iterdir():
        if path.name not in ("outputs", "runs", ".git", ".venv", ".venv-peer"):
            (folder / path.name).symlink_to(path)
    for page in ("cookbook.md", "programs.md", "tutorial/domain.md", "tutorial/algorithm.md"):
        for name, body in programs(page).items():
            (folder / name).write_text(body)
    if not (folder / "models").exists():  # `make real-model` was not run: a small stand-in
        (folder / "models").mkdir()
        stand_in = folder / "models" / "smollm2-135m-instruct"
        stand_in.symlink_to(ROOT / "comlrl/builtin/tiny_coder")
    (folder / "outputs").mkdir()
    (folder / "outputs/tiny_coder_long").symlink_to(ROOT / "comlrl/builtin/tiny_coder")
    first = (ROOT / "comlrl/builtin/coopmini/eval.jsonl").read_text().splitlines()[0]
    row = json.loads(first) | {"task_id": "HumanEval/0"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "aux.py").write_text("def aux(x):\n    return x\n")
    (folder / "main.py").write_text(f"def {row['entry_point']}(x):\n    return aux(x)\n")
    return folder


@pytest.fixture(scope="module")
def small_runs(place: Path) -> Path:
    """The runs that pages name: one step each, of the quickstart."""
    script, first = ROOT / "train_magrpo.py", place / "outputs" / "magrpo_coopmini_42"
    small = "magrpo.max_steps=1 magrpo.batch_size=1 magrpo.num_generations=2"
    small += " magrpo.max_new_tokens=4 magrpo.eval_num_samples=1"
    arguments = ["--config", ROOT / "configs/magrpo_quickstart.yaml", "--override"]
    processes.python(script, *arguments, f"output.dir={first}", *small.split(), cwd=place)
    for name in READ_RUNS - {"outputs/magrpo_coopmini_42", "outputs/best_coopmini_42"}:
        shutil.copytree(first, place / name)
    other = place / "outputs/main/config.yaml"  # a comparison has two settings
    other.write_text(other.read_text().replace("kl_coef: 0.02", "kl_coef: 0.03"))
    return place


@pytest.mark.parametrize("command", DISTINCT, ids=str)
def test_command(command, place, monkeypatch, request):
    monkeypatch.chdir(place)
    words = list(command.words)
    words[:1] = {"python3": ["python"], ".venv/bin/python": ["python"]}.get(words[0], words[:1])
    if Path(words[0]).name == "comlrl" and words[1] == "export":
        assert export.parse_arguments(words[2:]).run
        return
    if words == ["comlrl", "--version"]:
        return
    if Path(words[0]).name == "comlrl":
        words = ["python", *script_of(words[1:])]
    if words[0] == "torchrun":
        words = torchrun(words[1:])
    if words[0] == "sbatch":
        script, algorithm, config, folder, *overrides = words[1:]
        assert (ROOT / script).exists()
        words = ["python", f"train_{algorithm}.py", "--config", config, "--override"]
        words += [f"output.dir={folder}", *overrides]
    if words[0] == "make":
        done = subprocess.run(["make", "-n", words[1]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif words[0] == "python":
        python(words[1:], request)
    else:
        assert words[0] in OUTSIDE, f"{words[0]} is neither ours nor known"
        for word in words[1:]:
            assert not word.startswith("configs/") or (ROOT / word).exists()


def script_of(words: list[str]) -> list[str]:
    """The script that is the same as a ``comlrl`` command, a shipped configuration by its name."""
    if words[0] == "train":
        return [f"train_{words[1]}.py", *words[2:]]
    return {"report": ["-m", "comlrl.trainers.launch", "report"]}.get(
        words[0], [f"{words[0]}.py"]
    ) + words[1:]


def torchrun(words: list[str]) -> list[str]:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words)
    return ["python", given.training_script, *given.training_script_args]


def python(words: list[str], request: pytest.FixtureRequest) -> None:
    """Runs what follows ``python``, in this process."""
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return
    name = words[1] if words[0] == "-m" else words[0]
    arguments = words[2:] if words[0] == "-m" else words[1:]
    if name == "train_best.py":
        assert Path(name).exists()  # it is run below
    elif match := re.fullmatch(r"train_(\w+)\.py", name):
        assert (ROOT / name).exists()
        # What --measure trains is run in tests/trainers/launch/cost/test_measured.py.
        arguments = [word for word in arguments if word != "--measure"] + ["--dry-run"]
        if any(word.startswith("init_from=") for word in arguments):
            request.getfixturevalue("small_runs")
        if any(word.startswith("output.dir=") for word in arguments):  # its run may lie there
            arguments += ["--override", "output.overwrite=true"]
        assert train_main(match[1], lambda run: pytest.fail("trained"), arguments) == 0
    elif name == "evaluate.py":
        evaluate(arguments, request)
    elif name == "sweep.py":
        from comlrl.trainers.launch.commands import sweep
        from comlrl.trainers.launch.commands.search import read_sweep

        read_sweep(sweep.parse_arguments(arguments).file)
    elif name == "arena.py":
        from comlrl.trainers.launch.commands import arena

        arena.plan(arena.parse(arguments))
    elif name == "comlrl.trainers.launch" and arguments[0] == "report":
        from comlrl.trainers.launch.commands import report

        request.getfixturevalue("small_runs")
        assert report.main(arguments[1:]) == 0
    elif name in ("tools/make_coopmini.py", "tools/make_posts.py"):
        as_program(name, arguments)
        assert Path(arguments[-1]).read_text().count("\n") == 20
    elif name == "tools/show_prompts.py":
        as_program(name, arguments)
    elif name in ("tools.config_reference", "tools/draw_credit.py"):
        assert not arguments  # their pages are kept fresh by tests
    elif name != "venv":
        file = f"{name.replace('.', '/')}.py" if words[0] == "-m" else name
        known_options(ROOT / file, arguments)


def as_program(name: str, arguments: list[str]) -> None:
    """A module or file, run as ``python`` would, in this process."""
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        if name.endswith(".py"):
            runpy.run_path(str(ROOT / name), run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__")
    except SystemExit as left:
        assert not left.code
    finally:
        sys.argv = before


def evaluate(arguments: list[str], request: pytest.FixtureRequest) -> None:
    from comlrl.trainers.launch.commands import evaluate as script

    request.getfixturevalue("small_runs")
    if "--num-agents" in arguments:  # of SHPPO's runs: test_evaluate
        script.parse_arguments(arguments)
        return
    keep = [a for a in arguments if "eval_num_samples" not in a]
    own = any("best" in word for word in arguments)
    name = "best" if own and request.getfixturevalue("best_run") else "magrpo"
    small = ["--override", f"{name}.eval_num_samples=1", f"{name}.max_new_tokens=2"]
    assert script.main([*keep, *small]) == 0


def known_options(file: Path, arguments: list[str]) -> None:
    """A program of minutes: it is there, and knows its options."""
    source = file.read_text(encoding="utf-8")
    for option in arguments:
        if option.startswith("--"):
            assert f'"{option}"' in source, f"{file.name} has no {option}"


def test_there_are_commands_on_the_pages_that_have_some():
    pages = {command.page for command in COMMANDS}
    assert {"README.md", "docs/cookbook.md", "docs/algorithms.md", "docs/external.md"} <= pages


def test_the_table_of_a_domain_names_all_that_it_may_have():
    text = (ROOT / "docs/tutorial/domain.md").read_text(encoding="utf-8")
    _, body = text.split("## All of a domain\n")
    rows = re.findall(r"^\| `(\w+)` \| (yes|where [^|]*|) ?\|", body.split("\n## ")[0], re.M)
    assert {name for name, _ in rows} == {*Domain.__annotations__, *METHODS}
    inherited = {name for name in (*METHODS, "revision", "prefill") if name not in NEEDED}
    assert {name for name, needed in rows if needed != "yes"} == inherited


def test_what_an_agent_must_not_see_stays_hidden_whatever_its_template_asks_for():
    scope: dict[str, Any] = {}
    exec(programs("cookbook.md")["guess.py"], scope)
    domain, secret = scope["GUESSING"], "secret: {secret}"
    task = domain.task("t", {"secret": 2})
    guide, guesser = Prompts(domain, {"guide": secret, "guesser": secret}).first(task, 2)
    assert guide == "secret: 2" and guesser == f"secret: {scope['HIDDEN']}"
    assert "2" not in domain.problem(task).replace("1, 2, 3", "")
    score = scope["Guess"]().score
    guesses = [(" small", "2\n", 1.2), ("2", "2", 0.0), ("big", "3", 0.2)]
    for hint, guess, value in guesses:
        (found,) = score([JointAction(task, (hint, guess))])
        assert found.value == value == sum(found.parts.values())
        assert found.passed == (value > 1)


def test_the_guesser_of_the_cookbook_reads_the_hint_behind_its_prompt(place):
    out = place / "outputs" / "guess"
    keys = [f"magrpo.{key}={value}" for key, value in (TINY | {"eval_interval": 0}).items()]
    keys += [f"output.dir={out}", "lora.r=2", "output.verbose=true"]
    processes.python("train_magrpo.py", "--config", "guess.yaml", "--override", *keys, cwd=place)
    record = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["step"] == 2 * 2 * 4  # tasks × hints × guesses
    assert record["metrics"]["agent_1/completion_length_mean"] <= 2  # the guesser's own limit


TINY = {"batch_size": 2, "num_generations": 2, "max_steps": 1, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def best_run(place: Path) -> Path:
    """A run of the tutorial's algorithm, of one step."""
    out = place / "outputs" / "best_coopmini_42"
    keys = [f"best.{key}={value}" for key, value in (TINY | {"eval_interval": 0}).items()]
    keys += [f"output.dir={out}", "lora.r=2", "best.least_reward=0"]
    processes.python("train_best.py", "--config", "best.yaml", "--override", *keys, cwd=place)
    return out


def test_the_algorithm_of_the_tutorial_trains(best_run):
    record = json.loads((best_run / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["step"] == 4  # 2 tasks × 2 joint actions
    assert record["update"] == 1 and record["metrics"]["taught_share"] >= 0.5


def test_rows_of_the_cookbook_are_tasks(place, monkeypatch):
    from comlrl.config.sections import DatasetConfig
    from comlrl.rewards.code.domain import CODE
    from comlrl.tasks.datasets import load_tasks

    monkeypatch.chdir(place)
    section = DatasetConfig(name="my_tasks.jsonl")
    tasks = [t for s in ("train[1:]", "train[:1]") for t in load_tasks(section, s, CODE)]
    assert [task.task_id for task in tasks] == ["mine/1", "mine/0"]


def test_mode_of_the_cookbook_says_what_it_should():
    from comlrl.rewards.code.breakdown import RewardBreakdown
    from comlrl.rewards.code.domain import CODE
    from comlrl.rewards.sandbox.outcome import TestOutcome
    from comlrl.tasks.prompts import Prompts
    from comlrl.types import Attempt, Score
    from tests.support.fakes import task

    scope: dict[str, Callable] = {}
    exec(programs("cookbook.md")["count.py"], scope)
    outcomes = (TestOutcome("assert a", True), TestOutcome("assert b", False))
    score = Score(1.5, facts=RewardBreakdown(outcomes=outcomes))
    (texts,) = scope["Count"](Prompts(CODE))([Attempt(task(), ("", ""), score, 1)])
    assert len(texts) == 2 and "1 of 2 tests passed." in texts[0] and "`aux`" in texts[0]


def test_the_drawing_is_fresh():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        drawing = importlib.import_module("draw_credit")
    finally:
        sys.path.pop(0)
    assert drawing.FILE.read_text(encoding="utf-8") == drawing.draw(), "python tools/draw_credit.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_files_are_there(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", text, flags=re.S))
    missing = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|ya?ml|md|sh|jsonl|svg|png|txt))`", text)
    ours = {path.name for path in ROOT.iterdir()}
    shown = (
        set(programs(page.relative_to(ROOT / "docs").as_posix())) | {"trainers/best.py"}
        if page.parent != ROOT
        else set()
    )
    missing += [
        x for x in named
        if x.split("/")[0] in ours - {"outputs"} and x not in shown and not (ROOT / x).exists()
    ]  # fmt: skip
    assert missing == []


def test_every_page_is_in_the_navigation():
    named = re.findall(r"[:-] ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in pages)


def test_the_table_of_configurations_names_every_file():
    text = (ROOT / "docs/configs.md").read_text(encoding="utf-8")
    files = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert set(re.findall(r"`(\w+\.yaml)`", text)) == files


def exists(key: str) -> bool:
    """Whether a dotted key is one of the configuration's."""
    section, _, name = key.partition(".")
    if not name:
        return section in {f.name for f in dataclasses.fields(Root)}
    classes = SECTIONS.values() if section == "<algo>" else [EVERY_SECTION[section]]
    return any(f.name == name for cls in classes for f in dataclasses.fields(cls))


def keys_named(text: str) -> set[str]:
    """Dotted names in code whose head is a section; modules of that name are not keys."""
    heads = "|".join(EVERY_SECTION)
    code = re.findall(r"`([^`\n]+)`", text)
    found = {m for span in code for m in re.findall(rf"^((?:{heads}|<algo>)\.[a-z_]+)", span)}
    return {k for k in found if not re.search(r"\.(py|md|ya?ml|jsonl?)$", k)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_keys_exist(page):
    text = page.read_text(encoding="utf-8")
    if page.name == "configuration.md":
        text = text.split("## Older spellings")[0]
    if page.name == "migration.md":
        text = re.sub(r"^\| `[^|]*\|", "|", text, flags=re.M)
    assert sorted(key for key in keys_named(text) if not exists(key)) == []
    for language, body in blocks(text):
        if language == "yaml":
            assert_yaml_is_known(body)


def assert_yaml_is_known(body: str) -> None:
    tree = yaml.safe_load(body)
    algorithm = next((name for name in SECTIONS if name in tree), "magrpo")
    tree.pop("best", None)
    loader = Loader(algorithm, sections_of(algorithm))
    leaves = loader.leaves(tree)
    if "method" in tree:  # a sweep
        points = {key: points for key, points in tree["parameters"].items() if key != "config"}
        leaves = [(key, value) for key, each in points.items() for value in each["values"]]
    for key, value in leaves:
        loader.set(Setting(key, value, "docs"))


def test_tables_of_algorithms_name_their_own_keys():
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    pages = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert {name.lower() for name in pages} == set(SECTIONS)
    for name, body in pages.items():
        own = {f.name for f in dataclasses.fields(SECTIONS[name.lower()])}
        assert set(re.findall(r"^\| `(\w+)` \|", body, re.M)) <= own, name


def test_migration_says_what_the_loader_does():
    text = (ROOT / "docs/migration.md").read_text(encoding="utf-8").split("## Settings")[0]
    rows = re.findall(r"^\| `([\w.<>]+)` \| (?:`([\w.<>]+)`|–) \| (\w+)", text, re.M)
    assert len(rows) > 30
    documented = {old for old, _, what in rows if what == "read"}
    assert set(ALIASES) <= documented
    for old, new, what in rows:
        algorithm = "marlhf" if old.startswith("marlhf") else "magrpo"
        assert not new or exists(new), new
        loader = Loader(algorithm, sections_of(algorithm))
        if what == "remove" or (what == "rename" and old != new):
            loader.set(Setting(old.replace("<algo>", algorithm), None, "old"))
            with pytest.raises(UserError, match=old.rpartition(".")[2]):
                loader.build()  # which names all unknown keys at once
        elif what == "read" and old in ALIASES:
            assert (ALIASES[old] or "") == new
