"""``comlrl export``: writes a run's weights for use elsewhere, as adapters or as full models."""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from comlrl.config.sections import AgentModelConfig
from comlrl.errors import UserError, report
from comlrl.files import tolerant_terminal
from comlrl.run_files import ADAPTER, HETEROGENEOUS, agent_folders
from comlrl.trainers.launch.commands.command_line import Parser, print_written
from comlrl.trainers.launch.wiring import weights
from comlrl.trainers.launch.wiring.assembly import saver
from comlrl.trainers.launch.wiring.load import config_of, load_agents
from comlrl.trainers.launch.wiring.weights import Trained


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    tolerant_terminal()
    try:
        arguments = parse_arguments(argv)
        run, out = check(arguments.run, arguments.out, arguments.merge, arguments.push)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' warnings are not actionable
            export(run, out, merge=arguments.merge)
        print_written(out)
        if arguments.push:
            print(f"pushed: {push(out, arguments.push)}")
    except Exception as error:
        return report(error)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("export", description="Write a run's weights for use elsewhere.")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run, its final_model or best_model, or a checkpoint of it")
    add("--merge", action="store_true", help="write a whole model for each agent, without PEFT")
    add("--out", metavar="DIR", help="default: exported_model in the run")
    add(
        "--push",
        metavar="USER/NAME",
        help="also upload it to this repository of the hub; a new one is private",
    )
    return parser.parse_args(argv)


def check(
    path: str, folder: str | None, merge: bool, repository: str | None
) -> tuple[Trained, Path]:
    """Return the run to export and the target folder. Raises UserError if the export is invalid."""
    run = weights.pinned(weights.locate(path, "RUN"), "RUN")
    if run.run_dir is None:
        raise UserError(f"RUN: '{run.name}' is not a run; name a run directory, or a folder in one")
    out = Path(folder) if folder else run.run_dir / "exported_model"
    if out.exists():
        raise UserError(f"--out: '{out}' exists already; choose another folder, or remove it")
    place = run.final_model or run.checkpoint
    assert place is not None
    if merge and any(place.glob(f"{HETEROGENEOUS}*")):
        raise UserError(
            f"--merge: the agents of '{run.name}' differ by networks beside their model, "
            "which no plain model can hold; leave --merge out"
        )
    if merge and run.final_model and not (run.final_model / "agent_0" / ADAPTER).exists():
        raise UserError(f"--merge: '{run.name}' holds whole models already; leave --merge out")
    if repository and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UserError(f"--push: {repository!r} is not a repository; use USER/NAME")
    return run, out


def export(run: Trained, out: Path, *, merge: bool) -> None:
    """Write ``out/agent_N/`` atomically.

    Without ``merge``, the format is that of ``final_model``, even if a run has only checkpoints.
    With ``merge``, agents are full models in the precision in which the run loaded its base.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        saved = Path(folder) / "saved"
        if run.final_model is not None:
            shutil.copytree(run.final_model, saved)
        else:
            saver(*load_agents(run))(saved)
        if merge:
            config = config_of(run)
            for model, agent in zip(config.agent_models, agent_folders(saved), strict=False):
                _merge(config.agent_model, model, agent)
            (saved / "README.md").unlink(missing_ok=True)  # it explains how to load adapters
        saved.rename(out)


def _merge(section: AgentModelConfig, model: str, agent: Path) -> None:
    """Replace an adapter with its merged model: W + (alpha / r) B A for each adapted W."""
    from peft import PeftModel

    from comlrl.models.pretrained import load_model

    base, tokenizer = load_model(section, model, "cpu")
    merged = PeftModel.from_pretrained(base, str(agent)).merge_and_unload(safe_merge=True)
    shutil.rmtree(agent)
    merged.save_pretrained(agent)
    tokenizer.save_pretrained(agent)


def push(folder: Path, repository: str) -> str:
    """Upload a folder to the hub and return its address. Raises UserError if that fails."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    hub = huggingface_hub.HfApi()
    try:
        url = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--push: {repository!r}: {reason}; log in with `hf auth login` and push again "
            f"(the export stays in '{folder}')"
        ) from error
    return str(url)
