"""Every configuration for a benchmark runs end to end, and leaves weights that evaluate.

Two training steps of a random model on rows of HumanEval or CoopHumanEval.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from tests.support import tiny_models
from tests.support.runs import ROOT, Zygote, algorithm_of

SHIPPED = sorted(p for kind in ("he", "che", "mbpp") for p in ROOT.glob(f"configs/*_{kind}_*.yaml"))
DEFAULT = (
    "mt_magrpo_he",
    "grpo_mbpp",
    "madpo_he",
    "shppo_che",
    "mappo_he",
)  # the others are slow in all
HELPERS = 40  # tokens that are a whole helper: some answers earn something, and not all the same


@functools.cache
def model() -> Path:
    """A random Qwen2 of two layers and 6,000 positions, with a chat template."""
    folder = Path(tempfile.mkdtemp(prefix="random_qwen2_"))
    own = tiny_models.tokenizer(chat=True)
    core = Tokenizer.from_str(own.backend_tokenizer.to_str())
    core.add_tokens([f"def aux(x):\n    return x + {i}\n" for i in range(HELPERS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = own.chat_template
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    settings = Qwen2Config(
        vocab_size=len(fast), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=6000,
        eos_token_id=tiny_models.EOS, pad_token_id=tiny_models.PAD, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    return folder


def overrides(algorithm: str, rows: Path, folder: Path) -> list[str]:
    """Less of everything, and nothing else than what the file says."""
    keys = {
        "agent_model.name": str(model()), "agent_model.torch_dtype": "float32",
        "agent_model.max_length": 6000, "dataset.name": str(rows), "wandb": None,
        "dataset.train_split": "test[4:10]", "dataset.eval_split": "test[:2]",
        "output.dir": str(folder),
    }  # fmt: skip
    for section in {algorithm, "magrpo"} if algorithm == "marlhf" else {algorithm}:
        keys |= {f"{section}.{k}": v for k, v in {"max_new_tokens": 12, "batch_size": 2}.items()}
        keys |= {f"{section}.max_steps": 2, f"{section}.eval_num_samples": 2}
    if algorithm == "marlhf":
        keys["marlhf.reward_min_accuracy"] = 0
    if algorithm in ("madpo", "marlhf"):
        keys[f"{algorithm}.preference_num_candidates"] = 8
        keys[f"{algorithm}.top_p"] = 0.99
        keys[f"{algorithm}.temperature"] = 1.0
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def test_all_are_found() -> None:
    assert len(SHIPPED) == 28  # 22 as published; IPPO, MAPPO and agents in order for he and che


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=(name := path.stem.removesuffix("_config")),
            marks=() if name in DEFAULT else pytest.mark.slow,
        )
        for path in SHIPPED
    ],
)
def test_a_shipped_configuration_leaves_weights_that_evaluate(
    path: Path, zygote: Zygote, shared_data: Path, tmp_path: Path
) -> None:
    algorithm = algorithm_of(path)
    rows = tmp_path / "test.jsonl"
    source = "CoopHumanEval.jsonl" if "_che_" in path.stem else "HumanEval.jsonl"
    shutil.copy(shared_data / source, rows)
    run = tmp_path / "run"
    arguments = ["--config", str(path), "--override", *overrides(algorithm, rows, run)]
    if "critic_model" in path.read_text():
        arguments.append(f"{algorithm}.critic_model={model()}")
    process = zygote.finish(algorithm, arguments)
    assert "leaves no weights" not in process.output
    assert json.loads((run / "summary.json").read_text())["updates"] >= 1
    config = yaml.safe_load((run / "config.yaml").read_text())
    asked = yaml.safe_load(path.read_text())
    assert "output" not in asked and config["output"]["save_final_model"] == "auto"
    evaluation = tmp_path / "evaluation.json"
    call = ["--checkpoint", str(run), "--out", str(evaluation)]
    process = zygote.start({"call": [str(ROOT / "evaluate.py"), "main", [call]]})
    assert process.wait() == 0, process.output
    found = json.loads(evaluation.read_text())
    assert found["algorithm"] == algorithm and found["tasks"] == 2
    assert found["num_agents"] == config[algorithm]["num_agents"]
