"""Names of the files and folders of a run, of its checkpoints and of its models."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
LATENTS = "latents.jsonl"
EPISODES = "episodes.jsonl"
PREFERENCES = "preferences.jsonl"
PREFERENCES_SUMMARY = "preferences_summary.json"
ENVIRONMENT = "environment.json"
DOMAIN = "domain.json"
REPORT = "report.html"
API = "api"  # responses of API services that act as agents
CHECKPOINTS = "checkpoints"
STATE = "state.json"  # of a checkpoint
FINAL_MODEL = "final_model"
BEST_MODEL = "best_model"
ADAPTER = "adapter_config.json"  # PEFT's, in a model's folder
# SHPPO's networks, which let one policy act for all agents: a folder of a model, and a part of a
# checkpoint.
HETEROGENEOUS = "heterogeneous"


def agent_folders(model: Path) -> list[Path]:
    """Return the folders agent_0/, agent_1/, … of a team's model, in numerical order."""
    return sorted(model.glob("agent_*"), key=lambda folder: (len(folder.name), folder.name))
