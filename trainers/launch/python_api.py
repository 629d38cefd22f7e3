"""``comlrl.train`` and ``comlrl.evaluate``: the Python API, on the code path of the commands."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from comlrl.config.algorithms import SECTIONS
from comlrl.config.plugins.targets import FROM_PYTHON, Target, passing
from comlrl.config.yaml_values import Setting
from comlrl.errors import UserError, in_one_line, near, notice
from comlrl.files import read_lines
from comlrl.loop.interrupts import Interrupted
from comlrl.run_files import ADAPTER, BEST_MODEL, DOMAIN, FINAL_MODEL, METRICS, REPORT
from comlrl.trainers.launch.checks.shipped import config_file
from comlrl.trainers.launch.commands import evaluate as evaluation
from comlrl.trainers.launch.commands import evaluation_plan
from comlrl.trainers.launch.commands.command_line import FLAGS, resolve
from comlrl.trainers.launch.commands.train import check, execute
from comlrl.trainers.launch.python_objects import (
    FunctionReward,
    Rows,
    TemplateDomain,
    check_roles,
    columns_of,
    reward_target,
    rows_target,
    sources_of,
    task_splits,
)
from comlrl.trainers.launch.wiring import weights
from comlrl.trainers.launch.wiring.life_cycle import life_cycle
from comlrl.trainers.launch.wiring.load import config_of
from comlrl.types import Reward, Score, Task

if TYPE_CHECKING:
    from comlrl.programs.program import Play

PYTHON = {  # command-line options in messages → Python arguments
    "add --resume-force": 'pass resume="force"', "add --resume": "pass resume=True",
    "--resume-force": 'resume="force"', "--resume": "resume=True", "--override": "overrides",
    "--config": "config", "--k": "k",
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The report page of a run, which a notebook displays."""

    path: Path

    def open(self) -> None:
        """Open the page in a browser."""
        webbrowser.open(self.path.resolve().as_uri())

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:700px;border:0"></iframe>'


@dataclass(frozen=True)
class Run:
    """A finished or interrupted run."""

    path: Path
    passed: tuple[Target, ...] = field(default=(), repr=False)  # keys set to Python objects

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one record per logged step and evaluation, suitable for ``pandas.DataFrame``:
        ``phase`` ("train" or "eval"), ``step`` (environment steps), and the metrics by name."""
        return [
            {key: value for key, value in record.items() if key != "metrics"} | record["metrics"]
            for record in read_lines(self.path / METRICS)
        ]

    @property
    def report(self) -> Report:
        """Return the run's report, written first if missing; ``run.report.open()`` shows it in a
        browser."""
        if not (self.path / REPORT).exists():
            from comlrl.loggers.report.write import write_report

            write_report(self.path)
        return Report(self.path / REPORT)

    def model(self, role: str) -> Any:
        """Load an agent's model on the CPU: a ``peft.PeftModel``, or a transformers model if all
        weights were trained. Raises UserError for an unknown role or a run without models."""
        from peft import PeftModel

        from comlrl.models.pretrained import load_model

        roles = json.loads((self.path / DOMAIN).read_text(encoding="utf-8"))["roles"]
        if role not in roles:
            raise UserError(f"role: {role!r}; {near(role, roles, 'there are {}')}")
        folders = [self.path / name for name in (FINAL_MODEL, BEST_MODEL)]
        saved = next((folder for folder in folders if (folder / "agent_0").is_dir()), None)
        if saved is None:
            raise UserError(
                f"model: '{self.path}' has no {FINAL_MODEL}; train with "
                "output.save_final_model=true"
            )
        config, index = config_of(weights.locate(saved)), roles.index(role)
        agent = saved / f"agent_{0 if config.section.one_policy else index}"
        name = config.agent_models[index]
        if not (agent / ADAPTER).is_file():
            return load_model(config.agent_model, str(agent), "cpu")[0]
        return PeftModel.from_pretrained(load_model(config.agent_model, name, "cpu")[0], str(agent))


def train(
    algorithm: str,
    *,
    tasks: Rows | Mapping[str, Rows] | str | None = None,
    agents: Mapping[str, str] | None = None,
    reward: Callable[[Task, Mapping[str, str]], float | Score] | type[Reward] | None = None,
    program: Play | None = None,
    model: str | None = None,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool | Literal["force"] = False,
) -> Run:
    """Train a team and return its run.

    Args:
        algorithm: "magrpo", "grpo", "madpo", "marlhf", "ppo" or "shppo".
        tasks: rows, texts (rows with only a ``prompt``) or a ``datasets.Dataset``; for several
            splits, a mapping such as ``{"train": …, "eval": …}``. A string: as ``dataset.name``.
        agents: role → prompt template, with the rows' columns in braces.
        reward: called as ``reward(task, answers)`` with the ``Task`` and role → answer; returns a
            number or a ``Score``. Or a ``Reward`` class.
        program: an async function ``play(task, agents)`` that plays one episode.
        model: as ``agent_model.name``.
        config: a YAML file, or a shipped one by name, which the other arguments override.
        overrides: dotted keys of docs/configuration.md → values; they take precedence.
        resume: continue from the newest checkpoint. "force": even if settings, rows or functions
            have changed.

    Raises:
        UserError: for anything that the command line would refuse, and if a passed function fails.
        KeyboardInterrupt: after Ctrl-C, once a checkpoint is saved.
    """
    if algorithm not in SECTIONS:
        raise UserError(f"algorithm: {algorithm!r}; {near(str(algorithm), SECTIONS, 'use {}')}")
    with _as_user_errors():
        passed, settings = _passed(algorithm, tasks, agents, reward, program)
        if model is not None:
            settings["agent_model.name"] = model
        arguments = argparse.Namespace(
            config=None if config is None else config_file(str(config)),
            override=_settings(settings, overrides),
            **dict.fromkeys(FLAGS),
        )
        with passing(passed), life_cycle(raises=True) as life:
            resolved, work, notices = resolve(algorithm, arguments)
            for target in passed:
                if target.key == "reward.target" and issubclass(target.obj, FunctionReward):
                    target.obj.roles = work.roles
                if target.key == "dataset.name":
                    work = replace(work, sources=(*work.sources, *target.sources))
            for text in notices + check(resolved, bool(resume)):
                notice(text)
            build = importlib.import_module(f"comlrl.train_{algorithm}").build
            execute(resolved, work, build, life, bool(resume), resume == "force")
    if life.code or life.loop is None:
        raise UserError(f"processes: another process ended the run, with exit code {life.code}")
    return Run(life.loop.run_dir, passed)


def evaluate(
    run: Run | str | Path,
    k: int | Sequence[int] = 1,
    *,
    tasks: Rows | None = None,
    samples: int | None = None,
    greedy: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluate a run's team and return the content of its JSON file: ``metrics`` (with ``pass@k``),
    their 95 % ``intervals``, ``budget`` and ``per_task``.

    Args:
        run: a run, or the folder of a run whose ``config.yaml`` names its tasks and reward.
        k: one or several values of k for pass@k.
        tasks: rows; None: those of ``dataset.eval_split``.
        samples: answers per task; None: the largest k.
        greedy: use greedy decoding.
        overrides: dotted keys → values.

    Raises UserError for anything that the command line would refuse.
    """
    passed = run.passed if isinstance(run, Run) else ()
    settings: dict[str, Any] = {}
    with _as_user_errors():
        if tasks is not None:
            passed = (*passed, rows_target(task_splits({"eval": tasks})))
            settings = {"dataset.name": FROM_PYTHON, "dataset.eval_split": "eval"}
        ks = [k] if isinstance(k, int) else list(k)
        arguments = evaluation_plan.parse_arguments(
            ["--checkpoint", str(run.path if isinstance(run, Run) else run)]
        )
        arguments.k, arguments.samples = ",".join(map(str, ks)), samples
        arguments.greedy = greedy
        arguments.override = _settings(settings, overrides)
        with passing(passed):
            return evaluation.evaluate(evaluation.pinned(evaluation_plan.make_plan(arguments)))


def _passed(
    algorithm: str, tasks: Any, agents: Any, reward: Any, program: Any
) -> tuple[tuple[Target, ...], dict[str, Any]]:
    """Return the passed objects, and the settings that refer to them."""
    passed: list[Target] = []
    settings: dict[str, Any] = {}
    splits = None
    if isinstance(tasks, str):
        settings["dataset.name"] = tasks
    elif tasks is not None:
        splits = task_splits(tasks)
        passed.append(rows_target(splits))
        settings["dataset.type"] = "python"
        if "eval" not in splits:
            settings["dataset.eval_split"] = next(iter(splits))
    if agents is not None:
        check_roles(agents)
        domain = TemplateDomain(agents, None if splits is None else columns_of(splits))
        passed.append(Target("domain", FROM_PYTHON, domain, ()))
        settings[f"{algorithm}.num_agents"] = len(agents)
        settings |= {f"prompts.{role}": template for role, template in agents.items()}
    if reward is not None:
        passed.append(reward_target(reward))
    elif agents is not None and program is None:
        raise UserError("reward: missing; pass a function of (task, answers)")
    if program is not None:
        sources = sources_of("program", program)
        passed.append(Target("program.target", FROM_PYTHON, program, sources))
        if agents is not None:
            settings["program.agents"] = list(agents)
    return tuple(passed), settings | {target.key: FROM_PYTHON for target in passed}


def _settings(settings: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> list[Setting]:
    """Return settings with values that YAML can express: paths as strings, NumPy numbers as Python
    numbers. ``overrides`` take precedence."""
    plain = {
        key: str(value) if isinstance(value, Path) else getattr(value, "item", lambda v=value: v)()
        for key, value in (overrides or {}).items()
    }
    return [Setting(key, value, "--override") for key, value in {**settings, **plain}.items()]


@contextmanager
def _as_user_errors() -> Iterator[None]:
    """Convert errors of the user or the disk to UserError, naming arguments instead of options."""
    try:
        yield
    except Interrupted as interrupted:
        raise KeyboardInterrupt(_in_python(str(interrupted))) from None
    except Exception as error:
        printable = in_one_line(error)
        if printable is None:
            raise
        error.args = (_in_python(printable[0]),)
        if isinstance(error, UserError):
            raise
        raise UserError(*error.args) from error


def _in_python(text: str) -> str:
    options = "|".join(PYTHON)  # longer ones first
    return re.sub(rf"(?<![\w/.-])({options})(?![\w/-])", lambda option: PYTHON[option[0]], text)
