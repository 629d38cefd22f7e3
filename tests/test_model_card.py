"""The model card of a run made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from loggers.model_card import write_model_card
from tests.run_maker import make_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "magrpo_mini_1", updates=10)
    for agent in range(2):
        (run / "final_model" / f"agent_{agent}").mkdir(parents=True)
    (run / "final_model" / "README.md").write_text("[More Information Needed]")
    return run


def _with(run_dir: Path, **sections: dict) -> None:
    file = run_dir / "config.yaml"
    config = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(config | sections))


def _front_matter(text: str) -> dict:
    _, facts, _ = text.split("---\n", 2)
    return yaml.safe_load(facts)


def test_card_names_roles_results_and_the_way_back(run_dir):
    text = write_model_card(run_dir).read_text()
    assert "| `agent_0` |  aux |" in text
    assert "| `agent_1` | main |" in text
    assert "MAGRPO (arXiv 2508.04652)" in text
    assert "12 tasks of `builtin:coopmini`" in text  # the hand-made run evaluates twelve
    assert "evaluate.py --checkpoint" in text
    assert (run_dir / "final_model" / "README.md").read_text() == text  # PEFT's empty form is gone
    assert "# main of a team" in (run_dir / "final_model" / "agent_1" / "README.md").read_text()


def test_front_matter_names_what_a_hub_knows_and_nothing_local(run_dir):
    _with(
        run_dir,
        agent_model={"name": "Qwen/Qwen2.5-Coder-3B"},
        dataset={"name": "openai/openai_humaneval", "train_split": "test[33:163]"},
        lora={"enabled": True, "r": 16},
    )
    facts = _front_matter(write_model_card(run_dir).read_text())
    assert facts["base_model"] == "Qwen/Qwen2.5-Coder-3B"
    assert facts["datasets"] == ["openai/openai_humaneval"]
    assert facts["library_name"] == "peft"
    _with(run_dir, agent_model={"name": "/data/model"}, dataset={"name": "builtin:coopmini"})
    facts = _front_matter(write_model_card(run_dir).read_text())
    assert "base_model" not in facts and "datasets" not in facts


def test_a_run_that_never_evaluated_has_no_results(run_dir):
    (run_dir / "summary.json").write_text('{"algorithm": "magrpo", "eval_start": null}')
    assert "## Results" not in write_model_card(run_dir).read_text()
