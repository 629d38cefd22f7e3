"""Which Pythons are supported: every place says the same, and `make setup` refuses the others. And
the Dockerfile and the workflows, which nothing here can run: what they name is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from comlrl import builtin

ROOT = Path(__file__).parent.parent
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
PROJECT = (ROOT / "pyproject.toml").read_text()
CI = (ROOT / ".ci/run").read_text()


def test_every_place_says_the_same() -> None:
    requires = SpecifierSet(re.findall(r'requires-python = "(.*)"', PROJECT)[0])
    minors = [f"3.{minor}" for minor in range(8, 17)]
    assert tuple(minor for minor in minors if f"{minor}.1" in requires) == SUPPORTED
    assert tuple(re.findall(r"Python :: (3\.\d+)", PROJECT)) == SUPPORTED
    assert f"Python {SUPPORTED[0]} to {SUPPORTED[-1]}" in (ROOT / "README.md").read_text()
    assert f'WHEEL_PYTHONS="{" ".join(SUPPORTED)}"' in (ROOT / "Makefile").read_text()


def test_the_wheel_has_all_that_is_built_in() -> None:
    found = re.findall(r'^"comlrl.builtin" = (\[.*\])', PROJECT, re.M)[0]
    folder = Path(builtin.__file__).parent
    packed = {file for pattern in json.loads(found) for file in folder.glob(pattern)}
    for splits in builtin.DATASETS.values():
        assert packed.issuperset(splits.values())
    for model in builtin.MODELS.values():
        assert packed.issuperset(model.iterdir())


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == re.findall(r'^version = "(.*)"', PROJECT, re.M)[0]
    assert f"## {citation['version']} " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_dependency_has_one_pin(version: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    environment = {"python_version": version, "python_full_version": f"{version}.1"}
    held = [
        canonicalize_name(pin.name)
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(environment)
    ]
    assert len(held) == len(set(held))
    wanted = {
        canonicalize_name(name) for name in re.findall(r'^  "([\w-]+)(?!.*::)', PROJECT, re.M)
    }
    assert {"torch", "matplotlib", "pytest"} <= wanted <= set(held)


def make_setup(folder: Path, version: str) -> subprocess.CompletedProcess[str]:
    """With a Python that says it is ``version``, and that makes no environment."""
    python = folder / "python"
    program = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); exec(sys.argv[1])"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{program}" "$2"\nexit 7\n'
    )
    python.chmod(0o755)
    command = ["make", "setup", f"PYTHON={python}", f"VENV={folder / 'venv'}"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.14"])
def test_another_python_is_refused(tmp_path: Path, version: str) -> None:
    done = make_setup(tmp_path, version)
    ours, makes = done.stderr.splitlines()
    assert done.returncode == 2 and makes.startswith("make: ***")
    assert ours.startswith("CoMLRL runs on Python 3.10 to 3.13, and ")
    assert f" is {version}: make setup PYTHON=" in ours


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_supported_python_makes_the_environment(tmp_path: Path, version: str) -> None:
    done = make_setup(tmp_path, version)
    assert "CoMLRL runs on" not in done.stderr and "Error 7" in done.stderr


GITHUB, GITLAB = ROOT / ".github/workflows/ci.yml", ROOT / ".gitlab-ci.yml"


def github() -> tuple[dict[str, str], dict[str, Any]]:
    """What each job runs, and its Pythons."""
    jobs = yaml.safe_load(GITHUB.read_text())["jobs"]
    actions = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert all((ROOT / one / "action.yml").exists() for one in actions if one.startswith("./"))
    runs = {
        name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()
    }
    return runs, {
        n: job["strategy"]["matrix"]["python"] for n, job in jobs.items() if "strategy" in job
    }


def gitlab() -> tuple[dict[str, str], dict[str, Any]]:
    """The same of GitLab's."""
    parts = yaml.safe_load(GITLAB.read_text())
    jobs = {name: job for name, job in parts.items() if "script" in job}
    (pythons,) = parts[".pythons"]["parallel"]["matrix"]
    runs = {
        name: "\n".join([job["script"]] if isinstance(job["script"], str) else job["script"])
        for name, job in jobs.items()
    }
    return runs, {n: pythons["PYTHON"] for n, job in jobs.items() if ".pythons" in job["extends"]}


def test_cleaning_leaves_trained_runs() -> None:
    commands = subprocess.check_output(["make", "-n", "clean"], cwd=ROOT, text=True)
    assert ".venv" in commands and "outputs" not in commands


@pytest.mark.parametrize("host", [github, gitlab])
def test_a_workflow_does_what_ci_does_on_every_python(host) -> None:
    runs, pythons = host()
    assert {name: tuple(own) for name, own in pythons.items()} == dict.fromkeys(
        ("test", "wheel"), SUPPORTED
    )
    targets = {target for run in runs.values() for target in re.findall(r"\bmake ([\w-]+)", run)}
    assert targets == {"check", *re.findall(r"\bmake ([\w-]+)", CI)}
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)
    tests = re.search(r"^sandbox=\((.*)\)$", CI, re.M)
    assert tests and f'TESTS="{tests[1]}"' in runs["sandbox"]


DOCKERFILE = ROOT / "Dockerfile"


def test_the_dockerfile_is_linted() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = beside if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
