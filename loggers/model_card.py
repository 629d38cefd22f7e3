"""The model card of a trained team, written from the files of its run directory."""

from __future__ import annotations

from collections.abc import Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from comlrl.files import replace
from comlrl.loggers.report.run_data import Run, read_run
from comlrl.loggers.tables import code, plain, table
from comlrl.loggers.views.view import listed
from comlrl.run_files import BEST_MODEL, FINAL_MODEL, HETEROGENEOUS

SETTINGS = (
    "num_turns", "turn_order", "num_generations", "joint_mode", "handoff", "learning_rate",
    "discount",
)  # fmt: skip
RESULTS = ("reward_mean", "pass@1")
OWN = ("base", "folder", "team", "tokenizer")  # names in the snippet
BUILTINS = {  # their folders, as comlrl.builtin names them
    "builtin:tiny-coder": "TINY_CODER",
    "builtin:tiny-player": "TINY_PLAYER",
}
SHARED = """\
from comlrl.trainers.launch.wiring.load import load_sampler
from comlrl.types import Message, Request, Sampling

agents = load_sampler({run!r})  # base, adapter, and the layer that tells agents apart
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


def write_model_card(run_dir: str | Path, method: str = "") -> Path:
    """Write ``model_card.md`` beside ``final_model`` and as its README, and each agent's.

    ``method``: what the run was trained with, in words; left out: the algorithm's name. A hub
    shows the README of a folder that is uploaded; PEFT leaves an empty form there.
    """
    run = read_run(run_dir)
    for place in (run.path / name for name in (BEST_MODEL, FINAL_MODEL)):
        folders = sorted(folder.name for folder in place.glob("agent_*"))
        if not folders:
            continue
        text = card(run, place, method)
        readmes = [place / name / "README.md" for name in ("", *folders)]
        for file in (run.path / "model_card.md", *readmes):  # the last place's stays
            replace(file, text.encode("utf-8", "replace"))
    return run.path / "model_card.md"


def card(run: Run, place: Path, method: str = "") -> str:
    """Return the model card of the team in a folder of agent_0/, agent_1/, …

    It has the agents, their training, the results, how to use them, and the limitations.
    """
    folders = sorted(folder.name for folder in place.glob("agent_*"))
    section = run.config.get(run.algorithm, {})
    agents = [
        [f"`{f}`", f"{role}{_played(run, f)}"]
        for f, role in zip(folders, _roles(run, place, folders), strict=True)
    ]
    if _shared(place):
        agents.append(["`heterogeneous`", "what tells the agents apart"])
    count = section.get("num_agents", len(folders))
    settings = [[key, section[key]] for key in SETTINGS if section.get(key) is not None]
    ends = [
        ["environment steps", run.summary.get("env_steps")],
        ["updates", run.summary.get("updates")],
        ["seed", run.config.get("seed")],
    ]
    lora = run.config.get("lora", {})
    ranks = [(entry.get("lora") or {}).get("r") or lora.get("r") for entry in _entries(run)]
    shown = " and ".join(str(rank) for rank in dict.fromkeys(ranks or [lora.get("r")]))
    trained = f"LoRA of rank {shown}" if lora.get("enabled") else "all weights"
    dataset = run.config["dataset"]
    return "\n".join(
        [
            _front_matter(run),
            f"# A team of {count}, trained with {run.algorithm.upper()}\n",
            f"{count} agent(s) on {code(_base(run))} ({trained}) that {run.view.work}.\n",
            table(["folder", "role"], agents),
            "## Training\n",
            f"{method or run.algorithm.upper()}; tasks of {code(dataset['name'])} "
            f"{plain(dataset.get('train_split', ''))}. The whole configuration is the run's "
            "`config.yaml`.\n",
            table(["setting", "value"], [*settings, *ends]),
            _results(run),
            "## Use\n",
            f"```python\n{snippet(run, place)}```\n",
            f"`python evaluate.py --checkpoint RUN{_ks(run)}` runs the whole team on the held-out "
            "tasks.\n",
            "## Limits\n",
            LIMITS.format(caution=f"{run.view.caution} " if run.view.caution else ""),
            "",
        ]
    )


def snippet(run: Run, place: Path) -> str:
    """Return Python that loads the trained models, from the folder where the run was started."""
    if _shared(place):
        agents = run.config[run.algorithm]["num_agents"]
        roles = [run.role(agent) for agent in range(agents)]
        where = str(run.path if place.name == FINAL_MODEL else place)
        stop = tuple(run.config["agent_model"].get("stop") or ())
        return SHARED.format(run=where, roles=roles, stop=stop)
    folders = sorted(folder.name for folder in place.glob("agent_*"))
    named = _names(_roles(run, place, folders), folders)
    lora = run.config.get("lora", {}).get("enabled")
    bases = _bases(run) or [run.config["agent_model"]["name"]] * len(folders)
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if lora:
        lines.insert(0, "from peft import PeftModel")
        builtins = sorted({BUILTINS[base] for base in bases if base in BUILTINS})
        lines[:0] = [f"from comlrl.builtin import {', '.join(builtins)}"] if builtins else []
    lines.append(f"folder = {str(place)!r}")
    model = "AutoModelForCausalLM.from_pretrained({})"
    written = [BUILTINS.get(base, repr(base)) for base in bases]
    if not lora:
        for name, agent in zip(named, folders, strict=True):
            lines.append(f"{name} = {model.format(_within(agent))}")
    elif _bases(run):
        for name, agent, base in zip(named, folders, written, strict=True):
            lines.append(f"base = {model.format(base)}")
            lines.append(f"{name} = PeftModel.from_pretrained(base, {_within(agent)})")
    else:
        lines.append(f"base = {model.format(written[0])}")
        first = f'{_within(folders[0])}, adapter_name="{named[0]}"'
        lines.append(f"team = PeftModel.from_pretrained(base, {first})")
        for name, agent in list(zip(named, folders, strict=True))[1:]:
            lines.append(f'team.load_adapter({_within(agent)}, adapter_name="{name}")')
        lines.append(f'team.set_adapter("{named[-1]}")  # who answers')
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({_within(folders[-1])})")
    return "\n".join(lines) + "\n"


def _within(folder: str) -> str:
    return f'f"{{folder}}/{folder}"'


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


def _front_matter(run: Run) -> str:
    """Return the metadata that a hub indexes, without names that are local to this machine."""
    data, named = str(run.config["dataset"]["name"]), _bases(run)
    bases = [name for name in dict.fromkeys(named or [_base(run)]) if _on_hub(name)]
    facts = ModelCardData(
        library_name="peft" if run.config.get("lora", {}).get("enabled") else "transformers",
        pipeline_tag="text-generation",
        tags=["comlrl", "multi-agent", "reinforcement-learning", *run.view.tags, run.algorithm],
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=[data] if _on_hub(data) else None,
    )
    return f"---\n{facts.to_yaml()}\n---\n"


def _on_hub(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/")) and not Path(name).exists()


def _base(run: Run) -> str:
    bases = _bases(run)
    return ", ".join(dict.fromkeys(bases)) if bases else run.config["agent_model"]["name"]


def _bases(run: Run) -> list[str]:
    """Return the model of each agent; empty where all are adapters on one base."""
    agents, name = run.config.get("agents") or [], run.config["agent_model"]["name"]
    if isinstance(agents, list):
        return agents
    named = [agent.get("model") or name for agent in agents.values()]
    local = [base for base, agent in zip(named, _entries(run), strict=True) if not agent.get("api")]
    bases = [
        local[0] if agent.get("api") else base
        for base, agent in zip(named, _entries(run), strict=True)
    ]
    return bases if len(set(bases)) > 1 else []


def _entries(run: Run) -> list[dict[str, Any]]:
    """Return what is particular to each agent; empty where nothing is."""
    agents = run.config.get("agents") or {}
    return [entry or {} for entry in agents.values()] if isinstance(agents, dict) else []


def _played(run: Run, folder: str) -> str:
    """Return the words for an agent that a service played, whose weights are not here."""
    by_service = [f"agent_{i}" for i, entry in enumerate(_entries(run)) if entry.get("api")]
    return " (a service played it; these weights are untrained)" if folder in by_service else ""


def _shared(place: Path) -> bool:
    """Return whether one policy acts for all agents, with networks beside it for each agent."""
    return (place / HETEROGENEOUS).is_dir()


def _ks(run: Run) -> str:
    """Return the model card's pass@k option, if the run has a pass rate."""
    return " --k 1,3,5" if "pass_rate" in run.all_names else ""


def _names(roles: Sequence[str], folders: Sequence[str]) -> Sequence[str]:
    """Return the agents' names in Python: their roles, if those are identifiers."""
    fit = all(role.isidentifier() and not iskeyword(role) and role not in OWN for role in roles)
    return roles if fit else folders


def _roles(run: Run, place: Path, folders: list[str]) -> tuple[str, ...]:
    if _shared(place):
        return ("every agent",)
    if run.config.get(run.algorithm, {}).get("shared_policy"):
        return ("everyone",)
    return tuple(run.role(agent) for agent in range(len(folders)))
