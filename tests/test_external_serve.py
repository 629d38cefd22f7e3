"""expert_edits end to end: a real OpenAI-compatible server with a tiny model, started here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import external
from comlrl.types import Attempt, Task
from external.analysis import instruction

CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


def make_tiny_model(folder: Path) -> None:
    """A random two-layer Qwen2 over bytes with a chat template: what it says is noise."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", chat_template=CHAT
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
        eos_token_id=len(letters), pad_token_id=len(letters), tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(url: str, server: subprocess.Popen, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"transformers serve did not come up:\n{log.read_text()[-3000:]}")


@pytest.fixture
def served_model(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """(base address, model name) of a running `transformers serve`."""
    pytest.importorskip("fastapi", reason="transformers serve needs fastapi (test extra)")
    pytest.importorskip("uvicorn", reason="transformers serve needs uvicorn (test extra)")
    folder, log, port = tmp_path / "model", tmp_path / "serve.log", free_port()
    make_tiny_model(folder)
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }  # fmt: skip
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
            stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path,
        )  # fmt: skip
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", server, log, 120)
            yield f"http://127.0.0.1:{port}/v1", str(folder)
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def test_edits_of_a_served_model_reach_every_agent(served_model: tuple[str, str]) -> None:
    url, model = served_model
    section = SimpleNamespace(
        mode="expert_edits", sandbox_slice=1, expert_model=model, expert_base_url=url,
        on_error="stop", history="full", previous_response=True,
    )  # fmt: skip
    task = Task("T/1", "def top(xs):\n    '''The largest of xs.'''\n", "", "top")
    texts = ("def aux(xs):\n    return xs\n", "def top(xs):\n    return 0\n")
    transition = external.build(section)
    answers = transition([Attempt(task, texts, None, 1), Attempt(task, texts[1:], None, 1)])
    assert [len(answer) for answer in answers] == [2, 1]
    for answer, names in zip(answers, (("aux", "top"), ("top",)), strict=True):
        for text, name in zip(answer, names, strict=True):
            assert text.startswith("Feedback:\nAn expert proposes ")
            assert text.endswith(instruction(name))
    assert transition.fallbacks == 0
