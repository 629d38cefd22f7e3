"""The model card of a trained team, written from the files of its run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from comlrl.files import replace
from comlrl.loggers.report.run_data import Run, read_run
from comlrl.loggers.tables import code, plain, table
from comlrl.loggers.views.view import listed
from comlrl.run_files import BEST_MODEL, FINAL_MODEL, HETEROGENEOUS, agent_folders

SETTINGS = (
    "num_turns", "turn_order", "num_generations", "joint_mode", "handoff", "learning_rate",
    "discount",
)  # fmt: skip
RESULTS = ("reward_mean", "pass@1")
OWN = ("base", "folder", "team", "tokenizer")  # variables of the snippet
BUILTINS = {  # builtin model → its folder's name in comlrl.builtin
    "builtin:tiny-coder": "TINY_CODER",
    "builtin:tiny-player": "TINY_PLAYER",
}
SHARED = """\
from comlrl.trainers.launch.wiring.load import load_sampler
from comlrl.types import Message, Request, Sampling

agents = load_sampler({run!r})  # base, adapter, and the layer that distinguishes agents
roles = {roles!r}
asked = [(Message("user", f"What {{role}} is asked."),) for role in roles]
requests = [
    [Request(agents.encode(agent, prompt), (("key", "task", (), agent, 0),))]
    for agent, prompt in enumerate(asked)
]
sampling = Sampling(0.0, 64, stop={stop!r})
answers = [completions_G[0].text for (completions_G,) in agents.sample(requests, sampling)]
"""
LIMITS = """\
Each agent was trained with the others of this team and may have learned habits that only they
share; `python evaluate.py --cross-play RUN RUN` measures that. {caution}The data and the base model
have their own terms."""


@dataclass(frozen=True)
class Saved:
    """A run's team, saved in a folder of agent_0/, agent_1/, …, and its configuration."""

    run: Run
    place: Path

    @property
    def folders(self) -> list[str]:
        return [folder.name for folder in agent_folders(self.place)]

    @property
    def section(self) -> Mapping[str, Any]:
        return self.run.config.get(self.run.algorithm, {})

    @property
    def heterogeneous(self) -> bool:
        """Return whether the team is one policy with SHPPO's networks beside it."""
        return (self.place / HETEROGENEOUS).is_dir()

    @property
    def roles(self) -> list[str]:
        """Return the role of each folder's agent."""
        if self.heterogeneous:
            return ["every agent"]
        if self.section.get("shared_policy"):
            return ["everyone"]
        return [self.run.role(agent) for agent in range(len(self.folders))]

    @property
    def particulars(self) -> list[Mapping[str, Any]]:
        """Return the settings of individual agents; empty if there are none."""
        agents = self.run.config.get("agents") or {}
        return [] if isinstance(agents, list) else list(agents.values())

    @property
    def models(self) -> list[str]:
        """Return the distinct base models."""
        return list(dict.fromkeys(self._models_N))

    @property
    def bases(self) -> list[str]:
        """Return the base model of each agent; empty if all have the same."""
        return self._models_N if len(self.models) > 1 else []

    @property
    def _models_N(self) -> list[str]:
        """Return the model of each agent that the configuration lists, or the run's one model."""
        agents, name = self.run.config.get("agents"), self.run.config["agent_model"]["name"]
        if isinstance(agents, list):
            return agents
        local = [agent.get("model") or name for agent in self.particulars if not agent.get("api")]
        # An agent behind an API has no base; fill in that of the first local agent.
        return [
            local[0] if agent.get("api") else agent.get("model") or name
            for agent in self.particulars
        ] or [name]


def write_model_card(run_dir: str | Path, method: str = "") -> Path:
    """Write ``model_card.md`` beside ``final_model`` and as its README, and each agent's.

    ``method``: a description of the algorithm; by default its name. The hub shows the README of an
    uploaded folder, where PEFT would leave an empty template.
    """
    run = read_run(run_dir)
    for saved in (Saved(run, run.path / name) for name in (BEST_MODEL, FINAL_MODEL)):
        if not saved.folders:
            continue
        text = card(saved, method or run.algorithm.upper())
        readmes = [saved.place / name / "README.md" for name in ("", *saved.folders)]
        for file in (run.path / "model_card.md", *readmes):  # the last one written remains
            replace(file, text.encode("utf-8", "replace"))
    return run.path / "model_card.md"


def card(saved: Saved, method: str) -> str:
    """Return a team's model card: agents, training, results, usage and limitations."""
    run, section = saved.run, saved.section
    agents = [[f"`{f}`", role] for f, role in zip(saved.folders, saved.roles, strict=True)]
    for row, agent in zip(agents, saved.particulars, strict=False):
        if agent.get("api"):
            row[1] += " (a service played it; these weights are untrained)"
    if saved.heterogeneous:
        agents.append(["`heterogeneous`", "what distinguishes the agents"])
    count = section.get("num_agents", len(saved.folders))
    settings = [
        [key, f"{value:g}" if isinstance(value := section[key], float) else value]
        for key in SETTINGS
        if section.get(key) is not None
    ]
    ends = [
        ["environment steps", run.summary.get("env_steps")],
        ["updates", run.summary.get("updates")],
        ["seed", run.config.get("seed")],
    ]
    lora = run.config.get("lora", {})
    ranks = [(a.get("lora") or {}).get("r") or lora.get("r") for a in saved.particulars or [{}]]
    trained = f"LoRA of rank {' and '.join(map(str, dict.fromkeys(ranks)))}"
    if not lora.get("enabled"):
        trained = "all weights"
    ks = " --k 1,3,5" if "pass_rate" in run.all_names else ""
    dataset = run.config["dataset"]
    return "\n".join(
        [
            f"---\n{_metadata(saved).to_yaml()}\n---\n",
            f"# A team of {count}, trained with {run.algorithm.upper()}\n",
            f"{count} agent(s) on {code(', '.join(saved.models))} ({trained}) that "
            f"{run.view.work}.\n",
            table(["folder", "role"], agents),
            "## Training\n",
            f"{method}; tasks of {code(dataset['name'])} "
            f"{plain(dataset.get('train_split', ''))}. The whole configuration is the run's "
            "`config.yaml`.\n",
            table(["setting", "value"], [*settings, *ends]),
            _results(run),
            "## Use\n",
            f"```python\n{snippet(saved)}```\n",
            f"`python evaluate.py --checkpoint RUN{ks}` runs the whole team on the held-out "
            "tasks.\n",
            "## Limits\n",
            LIMITS.format(caution=f"{run.view.caution} " if run.view.caution else ""),
            "",
        ]
    )


def snippet(saved: Saved) -> str:
    """Return Python code that loads the trained models, to be run where the run was started."""
    run, folders, roles = saved.run, saved.folders, saved.roles
    if saved.heterogeneous:
        roles = [run.role(agent) for agent in range(saved.section["num_agents"])]
        where = str(run.path if saved.place.name == FINAL_MODEL else saved.place)
        stop = tuple(run.config["agent_model"].get("stop") or ())
        return SHARED.format(run=where, roles=roles, stop=stop)
    fit = all(role.isidentifier() and not iskeyword(role) and role not in OWN for role in roles)
    named = roles if fit else folders
    agents = [f'f"{{folder}}/{folder}"' for folder in folders]
    load = "AutoModelForCausalLM.from_pretrained({})".format
    lines = [f"folder = {str(saved.place)!r}"]
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if not run.config.get("lora", {}).get("enabled"):
        lines += [f"{name} = {load(agent)}" for name, agent in zip(named, agents, strict=True)]
    else:
        bases = [BUILTINS.get(base, repr(base)) for base in saved.bases or saved.models]
        builtins = ", ".join(sorted(set(bases).intersection(BUILTINS.values())))
        imports.insert(0, "from peft import PeftModel")
        imports[:0] = [f"from comlrl.builtin import {builtins}"] if builtins else []
        if saved.bases:
            for name, agent, base in zip(named, agents, bases, strict=True):
                lines.append(f"base = {load(base)}")
                lines.append(f"{name} = PeftModel.from_pretrained(base, {agent})")
        else:
            lines.append(f"base = {load(bases[0])}")
            first = f'{agents[0]}, adapter_name="{named[0]}"'
            lines.append(f"team = PeftModel.from_pretrained(base, {first})")
            for name, agent in list(zip(named, agents, strict=True))[1:]:
                lines.append(f'team.load_adapter({agent}, adapter_name="{name}")')
            lines.append(f'team.set_adapter("{named[-1]}")  # who answers')
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({agents[-1]})")
    return "\n".join([*imports, *lines]) + "\n"


def _results(run: Run) -> str:
    """Return held-out results before and after training; empty if the run never evaluated."""
    before, after = (run.summary.get(key) for key in ("eval_start", "eval_end"))
    if not before or not after:
        return ""
    names = [*(n for n in RESULTS if n in after), *listed(run.view.tables, after)]
    rows = [[name, before.get(name, "–"), after[name]] for name in names]
    dataset = run.config["dataset"]
    split = f"{code(dataset['name'])} {plain(dataset.get('eval_split', ''))}"
    tasks = int(after.get("tasks", 0))
    answers = run.config.get(run.algorithm, {}).get("eval_answers", 1)
    return f"## Results\n\n{tasks} tasks of {split}, answers to each: {answers}.\n\n" + table(
        ["metric", "before", "after"], rows
    )


def _metadata(saved: Saved) -> ModelCardData:
    """Return the metadata for the hub, without names that are local to this machine."""
    run, data = saved.run, str(saved.run.config["dataset"]["name"])
    bases = list(filter(_on_hub, saved.models))
    return ModelCardData(
        library_name="peft" if run.config.get("lora", {}).get("enabled") else "transformers",
        pipeline_tag="text-generation",
        tags=["comlrl", "multi-agent", "reinforcement-learning", *run.view.tags, run.algorithm],
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=[data] if _on_hub(data) else None,
    )


def _on_hub(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/")) and not Path(name).exists()
