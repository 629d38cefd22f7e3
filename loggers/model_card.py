"""The model card of a trained team, written from what lies in the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from loggers.metrics import roles
from loggers.run_data import Run, read_run
from loggers.tables import table

PAPERS = {
    "magrpo": "MAGRPO (arXiv 2508.04652)",
    "grpo": "GRPO (arXiv 2402.03300), as MAGRPO with one agent",
    "madpo": "MADPO: direct preference optimization (arXiv 2305.18290) of joint answers",
    "marlhf": "MARLHF: a joint reward model from preferences, then online RL",
    "ppo": "PPO (arXiv 1707.06347)",
    "shppo": "SHPPO (arXiv 2404.03869)",
}
TOLD = ("num_turns", "num_generations", "joint_mode", "handoff", "learning_rate", "discount")
RESULTS = ("reward_mean", "pass@1", "test_fraction", "syntax_rate", "aux_called_rate")
FOLDERS = {"builtin:tiny-coder": "comlrl/builtin/tiny_coder"}  # as transformers finds it
LOAD = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
main = PeftModel.from_pretrained(base, "final_model/{last}")
```
"""
LOAD_WHOLE = """\
```python
from transformers import AutoModelForCausalLM

main = AutoModelForCausalLM.from_pretrained("final_model/{last}")
```
"""
LIMITS = """\
Each agent was trained with the others of this team and may have learned habits that only they
share; `python evaluate.py --cross-play RUN RUN` measures that. What the agents write is code from
a language model: run it in a sandbox only. The data and the base model come with terms of their
own."""


def write_model_card(run_dir: str | Path) -> Path:
    """Write ``model_card.md`` beside ``final_model`` and as its README, also of each agent.

    A hub shows the README of a folder that is uploaded; PEFT leaves an empty form there.
    """
    run = read_run(run_dir)
    final = run.path / "final_model"
    folders = sorted(folder.name for folder in final.glob("agent_*"))
    text = card(run, folders)
    for file in (run.path / "model_card.md", final / "README.md"):
        file.write_text(text, encoding="utf-8")
    for folder, role in zip(folders, _roles(run, folders), strict=True):
        (final / folder / "README.md").write_text(_agent_card(run, folder, role), encoding="utf-8")
    return run.path / "model_card.md"


def card(run: Run, folders: list[str]) -> str:
    """The team's card: who, how trained, what came of it, how to use it, what to beware of."""
    section = run.config.get(run.algorithm, {})
    agents = [[f"`{f}`", role] for f, role in zip(folders, _roles(run, folders), strict=True)]
    if run.algorithm == "shppo":
        agents.append(["`heterogeneous`", "what tells the agents apart"])
    count = section.get("num_agents", len(folders))
    settings = [[key, section[key]] for key in TOLD if section.get(key) is not None]
    ends = [
        ["environment steps", run.summary.get("env_steps")],
        ["updates", run.summary.get("updates")],
        ["seed", run.config.get("seed")],
    ]
    lora = run.config.get("lora", {})
    trained = f"LoRA of rank {lora.get('r')}" if lora.get("enabled") else "all weights"
    load = LOAD if lora.get("enabled") else LOAD_WHOLE
    dataset = run.config["dataset"]
    return "\n".join(
        [
            _front_matter(run),
            f"# A team of {count}, trained with {run.algorithm.upper()}\n",
            f"{count} agent(s) on `{_base(run)}` ({trained}) that solve a programming task "
            "together: helpers write functions that main calls.\n",
            table(["folder", "role"], agents),
            "## Training\n",
            f"{PAPERS.get(run.algorithm, run.algorithm.upper())}; tasks of `{dataset['name']}` "
            f"{dataset.get('train_split', '')}. The whole configuration is the run's "
            "`config.yaml`.\n",
            table(["setting", "value"], [*settings, *ends]),
            _results(run),
            "## Use\n",
            load.format(base=FOLDERS.get(_base(run), _base(run)), last=folders[-1]),
            "`python evaluate.py --checkpoint RUN --k 1,3,5` runs the whole team on the held-out "
            "tasks.\n",
            "## Limits\n",
            LIMITS,
            "",
        ]
    )


def _results(run: Run) -> str:
    """Held-out tasks before and after training; empty where the run never evaluated."""
    before, after = (run.summary.get(key) for key in ("eval_start", "eval_end"))
    if not before or not after:
        return ""
    rows = [[name, before[name], after[name]] for name in RESULTS if name in after]
    split = f"`{run.config['dataset']['name']}` {run.config['dataset'].get('eval_split', '')}"
    tasks = int(after.get("tasks", 0))
    answers = run.config.get(run.algorithm, {}).get("eval_answers", 1)
    return f"## Results\n\n{tasks} tasks of {split}, answers to each: {answers}.\n\n" + table(
        ["metric", "before", "after"], rows
    )


def _agent_card(run: Run, folder: str, role: str) -> str:
    return (
        f"{_front_matter(run)}\n# {role} of a team trained with {run.algorithm.upper()}\n\n"
        f"`{folder}` on `{_base(run)}`. It was trained to work with the other agents beside it; "
        "the card of the whole team is the README of the folder above.\n"
    )


def _front_matter(run: Run) -> str:
    """What a hub indexes; names that only this machine knows are left out."""
    base, data = _base(run), str(run.config["dataset"]["name"])
    facts: dict[str, Any] = {
        "library_name": "peft" if run.config.get("lora", {}).get("enabled") else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["comlrl", "multi-agent", "reinforcement-learning", "code", run.algorithm],
    }
    facts |= {"base_model": base} if _on_hub(base) else {}
    facts |= {"datasets": [data]} if _on_hub(data) else {}
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---\n"


def _on_hub(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/")) and not Path(name).exists()


def _base(run: Run) -> str:
    agents = run.config.get("agents")
    return ", ".join(dict.fromkeys(agents)) if agents else run.config["agent_model"]["name"]


def _roles(run: Run, folders: list[str]) -> tuple[str, ...]:
    if run.algorithm == "shppo":
        return ("every agent",)
    return roles(len(folders))
