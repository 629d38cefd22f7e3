"""Who may import whom: floors of the house, and rooms of the core in the order of the pipeline.

Imports inside functions count, and so do those under ``if TYPE_CHECKING``: a name that a reader
must look up is a way that data takes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from comlrl.config.algorithms import SECTIONS
from tests.support.processes import python

ROOT = Path(__file__).resolve().parent.parent
# Folders at the top level that links make packages of comlrl.
LINKED = ("rewards", "external", "loggers", "trainers")

# A room imports from floors below its own; rooms of one floor do not import each other.
FLOORS: dict[str, int] = {
    "comlrl": 1,
    "comlrl.rewards": 2,
    "comlrl.external": 3,
    "comlrl.loggers": 3,
    "comlrl.trainers": 4,
    "comlrl.trainers.launch": 5,
    "benchmarks": 6,
    "tools": 6,
    "scripts of the top level": 6,
}
# The rooms of comlrl; each may import those above it here, and itself.
CORE = (
    "comlrl.quoting",
    "comlrl.errors",
    "comlrl.types",
    "comlrl.keyed",
    "comlrl.files",
    "comlrl.run_files",
    "comlrl.config",
    "comlrl.builtin",
    "comlrl.tasks",
    "comlrl.processes",
    "comlrl.models.fast",
    "comlrl.models",
    "comlrl.credit",
    "comlrl.rollout",
    "comlrl.rollout.vllm",
    "comlrl.programs",
    "comlrl.update",
    "comlrl.preferences",
    "comlrl.evaluation",
    "comlrl.loop",
)
# The rooms of the composition root; each may import those above it here, and itself.
LAUNCH = (
    "comlrl.trainers.launch.wiring",
    "comlrl.trainers.launch.cost",
    "comlrl.trainers.launch.checks",
    "comlrl.trainers.launch.commands",
)
# What tests import of each other.
HELPERS = (*(ROOT / "tests/support").glob("*.py"), ROOT / "tests/golden/toy.py")
# Trainers are siblings; the declared special case.
SIBLINGS = {("comlrl.trainers.grpo", "comlrl.trainers.magrpo")}


def _modules() -> dict[str, Path]:
    found = {}
    for package in ("comlrl", *LINKED, "benchmarks", "tools"):
        for file in (ROOT / package).rglob("*.py"):
            if file.parent == ROOT / "comlrl" and file.is_symlink():  # a train script
                continue
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = ("comlrl", *parts) if package in LINKED else parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found | {file.stem: file for file in ROOT.glob("*.py")}


MODULES = _modules()


def _imported(tree: ast.AST) -> set[str]:
    names = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            names |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom):
            assert not item.level, "relative import"
            names |= {f"{item.module}.{alias.name}" for alias in item.names}
    return names


def _module_of(name: str) -> str | None:
    """The module of ours that a dotted name lies in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


THIRD: dict[str, set[str]] = {}  # module → names imported from elsewhere
OWN: dict[str, set[str]] = {}  # module → modules of ours
for _name, _file in MODULES.items():
    _names = _imported(ast.parse(_file.read_text()))
    OWN[_name] = {m for n in _names if (m := _module_of(n)) is not None} - {_name}
    THIRD[_name] = {n for n in _names if _module_of(n) is None}


def _room(module: str, rooms) -> str | None:
    """The innermost of ``rooms`` that a module lies in."""
    inside = [room for room in rooms if module == room or module.startswith(room + ".")]
    return max(inside, key=len, default=None)


def _floor(module: str) -> int:
    return FLOORS[_room(module, FLOORS) or "scripts of the top level"]


def _may(module: str, other: str) -> bool:
    here, there = _room(module, FLOORS), _room(other, FLOORS)
    if here == there == "comlrl":
        if "comlrl" in (module, other):
            return False
        order = {room: place for place, room in enumerate(CORE)}
        return order[_room(other, CORE)] <= order[_room(module, CORE)]
    if here == there == "comlrl.trainers":
        return (module, other) in SIBLINGS
    if here == there == "comlrl.trainers.launch" and _room(other, LAUNCH) and _room(module, LAUNCH):
        return LAUNCH.index(_room(other, LAUNCH)) <= LAUNCH.index(_room(module, LAUNCH))
    return here == there or _floor(other) < _floor(module)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_imports_from_below(module):
    assert [other for other in sorted(OWN[module]) if not _may(module, other)] == []


def test_the_tables_name_every_room_and_no_other():
    core = {m for m in MODULES if m.startswith("comlrl.") and _room(m, FLOORS) == "comlrl"}
    assert {m for m in core if _room(m, CORE) is None} == set()
    assert {room for room in CORE if room not in core} == set()
    packages = {
        f.parent.name for f in ROOT.glob("*/*.py") if f.parent.name not in ("tests", "build")
    }
    floors = {room.removeprefix("comlrl.") for room in FLOORS if " " not in room}
    assert packages == {room for room in floors if "." not in room}
    assert {link.name for link in (ROOT / "comlrl").iterdir() if link.is_symlink()} == {
        *LINKED, *(f"train_{name}.py" for name in SECTIONS)
    }  # fmt: skip


def test_a_files_name_is_its_own():
    names = Counter(file.name for module, file in MODULES.items() if _floor(module) < 6)
    names -= Counter({"__init__.py": 99, "__main__.py": 9})
    assert [name for name, count in names.items() if count > 1] == []


def _circles(graph: dict[str, set[str]]) -> list[str]:
    found, done = [], set()

    def walk(node: str, path: tuple[str, ...]) -> None:
        if node in path:
            found.append(" → ".join((*path[path.index(node) :], node)))
        elif node not in done:
            for other in sorted(graph.get(node, ())):
                walk(other, (*path, node))
            done.add(node)

    for node in sorted(graph):
        walk(node, ())
    return found


def test_no_circle_of_files():
    assert _circles(OWN) == []


def test_no_circle_of_packages():
    def package(module: str) -> str:
        return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]

    graph: dict[str, set[str]] = {}
    for module, others in OWN.items():
        mine = graph.setdefault(package(module), set())
        mine |= {package(other) for other in others} - {package(module)}
    assert _circles(graph) == []


def test_the_code_domain_is_known_to_few():
    """Its own reward as functions, who builds a run, and tools; the sandbox runs whatever it is
    given."""
    users = {
        m for m, others in OWN.items() if any(_room(o, ["comlrl.rewards.code"]) for o in others)
    }
    assert {_room(m, FLOORS) for m in users} <= {
        "comlrl.rewards",
        "comlrl.trainers.launch",
        "benchmarks",
        "tools",
    }
    assert {_room(m, ["comlrl.rewards.sandbox"]) for m in users} == {None}


def _asks_for_a_section(call: ast.AST) -> bool:
    """Whether this is ``isinstance(…, SomeConfig)`` of an algorithm's section."""
    names = {base.__name__ for cls in SECTIONS.values() for base in cls.__mro__} - {"object"}
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("isinstance", "issubclass")
        and any(
            getattr(item, "id", getattr(item, "attr", None)) in names
            for item in ast.walk(call.args[1])
        )
    )


def test_nobody_outside_the_trainers_asks_which_algorithm_a_section_is_of():
    users = {
        module
        for module, file in MODULES.items()
        if _room(module, FLOORS) != "comlrl.trainers"
        and any(map(_asks_for_a_section, ast.walk(ast.parse(file.read_text()))))
    }
    assert users <= {"comlrl.trainers.launch.wiring.own_algorithm"}  # the class that a user gives


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_dashboards_are_imported_in_loggers_alone(package):
    users = {m for m, names in THIRD.items() if any(n.split(".")[0] == package for n in names)}
    assert {_room(module, FLOORS) for module in users} == {"comlrl.loggers"}


def test_equations_know_tensors_and_nothing_else():
    for module in ("comlrl.update.losses", "comlrl.types"):
        assert {n.split(".")[0] for n in THIRD[module]} <= {*sys.stdlib_module_names, "torch"}


def test_what_answers_at_once_is_without_torch():
    modules = (
        "comlrl.config.loader, comlrl.types, comlrl.trainers.launch.commands.command_line, "
        "comlrl.trainers.launch.cost.dry_run, comlrl.config.algorithms, "
        "comlrl.rewards.code_rewards, comlrl.external"
    )
    code = f"import sys, {modules}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    assert python("-c", code).stdout.split() == []


# What only a domain may speak of, in the names and texts of the rooms that serve every domain
# (comments aside, where keys of the configuration are named).
DOMAIN_WORD = re.compile(
    r"(?<![A-Za-z])([Aa]ux|[Ee]ntry_?[Pp]oint|[Hh]elper|[Ww]rapper|[Tt]est(?!\[|s\[))"
    r"s?(?![a-z])|\bsyntax_|\bdef \w"
)
MAIN = re.compile(r"(?<![\w.])main(?![A-Za-z]| process| one)")  # in texts: an agent
ANY_DOMAIN = ("comlrl", "trainers", "loggers", "external")
THEIR_OWN = {
    "comlrl/config/sections.py": "descriptions of keys that the code domain reads",
    "comlrl/builtin/": "makers of the code domain's data, and the data",
    "loggers/views/code": "how runs of the code domain are shown",
    "trainers/launch/commands/arena_cells.py": "`main` is what a user's train script calls",
}


def _domain_words(source: str) -> list[str]:
    found = []
    for item in ast.walk(ast.parse(source)):
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            found += [m[0] for m in (*DOMAIN_WORD.finditer(item.value), *MAIN.finditer(item.value))]
        for name in ("id", "attr", "arg", "name", "asname"):
            identifier = getattr(item, name, None)
            if isinstance(identifier, str):
                found += [m[0] for m in DOMAIN_WORD.finditer(identifier)]
                found += [identifier] if identifier.startswith("main_") else []
    return found


def _of_any_domain(suffix: str) -> list[str]:
    files = [file for room in ANY_DOMAIN for file in (ROOT / room).rglob(f"*{suffix}")]
    names = [file.relative_to(ROOT).as_posix() for file in files]
    return sorted(name for name in names if not name.startswith(tuple(THEIR_OWN)))


@pytest.mark.parametrize("file", _of_any_domain(".py"))
def test_rooms_of_every_domain_know_none(file):
    assert _domain_words((ROOT / file).read_text()) == []


@pytest.mark.parametrize("file", _of_any_domain(".html"))
def test_pages_of_every_domain_know_none(file):
    assert DOMAIN_WORD.findall((ROOT / file).read_text()) == []


@pytest.mark.parametrize(
    "source",
    [  # lines that stood in these rooms
        'SHOWN = ("reward_mean", "aux_called_rate")',
        "head = signature(task.prompt, task.entry_point)",
        'axis.set_xlabel("main of")',
        'MAIN = "Write `def f(x):`"',
        'metrics["test_fraction"] = 0.0',
        "from comlrl.types import TestOutcome",
        'parts = ["main_defined"]',
        'def measure():\n    "Share of helpers that main calls."',
    ],
)
def test_words_of_a_domain_are_found(source):
    assert _domain_words(source) != []


def test_words_of_all_domains_are_none():
    plain = 'if is_main(): "on the main process, split test[:16], auxiliary latest contest"'
    assert _domain_words(f"def main(): ...\n{plain}") == []
    assert all(list(ROOT.glob(f"{place}*")) for place in THEIR_OWN)


def test_tests_share_only_helpers():
    """What two test files use lies in tests/support/; no test file imports another."""
    shared = {".".join(f.relative_to(ROOT).with_suffix("").parts) for f in HELPERS}
    strangers = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / "tests").rglob("*.py")
        for name in _imported(ast.parse(file.read_text()))
        if name.split(".")[0] == "tests" and not {name, name.rpartition(".")[0]} & shared
    }
    assert strangers == set()


def test_scripts_are_thin():
    """A train script builds its trainer; the others are commands of the installed package."""
    for script in ROOT.glob("*.py"):
        limit = 80 if script.name.startswith("train_") else 20
        assert len(script.read_text().splitlines()) <= limit, script.name
