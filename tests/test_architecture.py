"""Who may import whom: one direction, no way back.

The rooms are the modules of ``comlrl`` and the packages beside it. Imports under
``if TYPE_CHECKING`` are names for readers and count for nothing; imports inside functions count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("comlrl", "trainers", "rewards", "external", "loggers")

# What everybody in comlrl may name: the values that travel, the words that agents read, and how a
# mistake of the user's is said.
VOCABULARY = {"comlrl.types", "comlrl.prompts", "comlrl.config"}
# They put everything together, like the scripts: nobody imports them but each other.
COMPOSITION = {"comlrl.launch", "comlrl.assemble", "comlrl.evaluation_plan", "comlrl.dry_run"}
COMPOSITION |= {"comlrl.load"}
COMPOSITION |= {"comlrl.at_hand"}
# Programs that make what is shipped; nobody imports them.
PROGRAMS = {"comlrl.builtin.pretrain", "comlrl.config_reference"}
SEAM = {"comlrl.distributed", "comlrl.sharding"}  # the identity where there is one process

# Module → the other rooms that it may import. Modules of comlrl that do not stand here are shared
# by several trainers: they may import any module of comlrl but the composition.
TABLE: dict[str, set[str]] = {
    "comlrl.types": set(),
    "comlrl.config": set(),
    "comlrl.settings": {"comlrl.config"},
    "comlrl.prompts": {"comlrl.types"},
    "comlrl.history": {"comlrl.types"},
    "comlrl.data": VOCABULARY | {"comlrl.builtin"},
    "comlrl.lora": set(),
    "comlrl.shared_prefix": set(),
    "comlrl.packed": {"comlrl.types"},
    "comlrl.lean": {"comlrl.lora", "comlrl.packed", "comlrl.shared_prefix"},
    "comlrl.decoding": {"comlrl.batching", "comlrl.lean", "comlrl.packed", "comlrl.team"}
    | {"comlrl.shared_prefix"},
    "comlrl.team": VOCABULARY | SEAM | {"comlrl.builtin", "comlrl.lean", "comlrl.lora"},
    "comlrl.generation": VOCABULARY
    | {"comlrl.decoding", "comlrl.packed", "comlrl.shared_prefix", "comlrl.team"},
    "comlrl.heterogeneous": VOCABULARY,
    "comlrl.text_states": {"comlrl.batching", "comlrl.lean", "comlrl.packed"},
    "comlrl.reward_model": VOCABULARY
    | {"comlrl.batching", "comlrl.lean", "comlrl.lora", "comlrl.preference", "comlrl.text_states"},
    "comlrl.best_model": SEAM,
    "comlrl.progress": set(),
    "comlrl.loop": VOCABULARY
    | SEAM
    | {"comlrl.best_model", "comlrl.checkpoint", "comlrl.collapse"}
    | {"comlrl.progress", "comlrl.signals", "comlrl.summary"},
    "comlrl.rollout": VOCABULARY | {"comlrl.history", "comlrl.returns"},
    "comlrl.returns": {"comlrl.types"},
    "comlrl.advantages": {"comlrl.types", "comlrl.returns"},
    "comlrl.batching": {"comlrl.types"},
    "comlrl.losses": set(),
    "comlrl.preference": VOCABULARY,
    "comlrl.policy": {"comlrl.types", "comlrl.batching", "comlrl.packed", "comlrl.team"}
    | {"comlrl.shared_prefix"},
    "comlrl.update": VOCABULARY
    | SEAM
    | {"comlrl.batching", "comlrl.policy", "comlrl.team", "comlrl.parallel"},
    "comlrl.checkpoint": VOCABULARY,
    "comlrl.distributed": VOCABULARY,
    "comlrl.evaluation": VOCABULARY | SEAM | {"comlrl.rollout"},
}
# Room → packages' modules that it may import beside its own.
ROOMS: dict[str, set[str]] = {
    "comlrl.builtin": {"comlrl.types", "comlrl.prompts", "comlrl.history"},
    "rewards": {"comlrl.types", "comlrl.prompts"},
    "external": {"comlrl.types", "comlrl.prompts", "rewards"},
    "loggers": {"comlrl.types", "comlrl.prompts", "comlrl.builtin.conventions"},
}


def _modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = _modules()


def _imported(tree: ast.AST) -> set[str]:
    """Dotted names that a file imports, those for type checkers left out."""
    skipped = {
        id(inner)
        for item in ast.walk(tree)
        if isinstance(item, ast.If) and "TYPE_CHECKING" in ast.unparse(item.test)
        for statement in item.body
        for inner in ast.walk(statement)
    }
    names = set()
    for item in ast.walk(tree):
        if id(item) in skipped:
            continue
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


def _room(module: str) -> str:
    if module.startswith("comlrl.builtin"):
        return "comlrl.builtin"
    return module if module.startswith("comlrl.") else module.partition(".")[0]


def _within(module: str, rooms: set[str]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


@pytest.mark.parametrize("module", sorted(set(MODULES) - COMPOSITION - PROGRAMS))
def test_a_room_imports_what_it_may(module):
    room = _room(module)
    if room == "trainers":
        allowed = {m for m in MODULES if m.startswith("comlrl")} - COMPOSITION
        allowed |= {"trainers.configs"} | ({"trainers.magrpo"} if "grpo" in module else set())
    elif room in TABLE:
        allowed = TABLE[room]
    elif room in ROOMS:
        allowed = ROOMS[room] | {room}
    else:
        allowed = {m for m in MODULES if m.startswith("comlrl")} - COMPOSITION
    assert sorted(m for m in OWN[module] if not _within(m, allowed)) == []


def test_the_table_names_real_modules():
    assert sorted(set(TABLE) - set(MODULES)) == []


def test_nobody_imports_the_programs():
    assert [m for m in MODULES if OWN[m] & PROGRAMS] == []


def test_no_way_back():
    """The imports between rooms have no circle."""
    rooms: dict[str, set[str]] = {_room(module): set() for module in MODULES}
    for module in set(MODULES) - PROGRAMS:
        rooms[_room(module)] |= {_room(other) for other in OWN[module]} - {_room(module)}
    done: set[str] = set()

    def walk(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, " → ".join((*path, room))
        if room not in done:
            for other in rooms[room]:
                walk(other, (*path, room))
            done.add(room)

    for room in rooms:
        walk(room, ())


def test_wandb_is_imported_in_loggers_alone():
    users = {m for m, names in THIRD.items() if any(n.split(".")[0] == "wandb" for n in names)}
    assert {_room(module) for module in users} == {"loggers"}


def test_equations_know_tensors_and_nothing_else():
    for module in ("comlrl.losses", "comlrl.types"):
        assert {n.split(".")[0] for n in THIRD[module]} <= {*sys.stdlib_module_names, "torch"}


def test_what_answers_at_once_is_without_torch():
    modules = "comlrl.config, comlrl.types, comlrl.prompts, comlrl.launch, comlrl.dry_run, "
    modules += "trainers.configs, rewards.code_rewards, external"
    code = f"import sys, {modules}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_scripts_are_thin():
    for script in ROOT.glob("train_*.py"):
        assert len(script.read_text().splitlines()) <= 100, script.name
