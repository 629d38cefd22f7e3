"""expert_edits end to end: a real OpenAI-compatible server with a tiny model, started here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from comlrl import external
from comlrl.config.sections import ExternalConfig
from comlrl.rewards.code.domain import CODE
from comlrl.rollout.vllm.processes import free_port
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt, Score
from tests.support.fakes import code_task

# The server finds where an answer of this kind of model starts by ChatML's marks.
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
REPLY = ("[aux]\n", "Sort `xs` first.\n", "[top]\n", "Take the last of them.")


def make_tiny_model(folder: Path) -> None:
    """A one-layer Qwen2 over bytes that answers every chat with the words of REPLY.

    Embeddings are one-hot and the layer adds nothing, so the next token depends on the last one
    alone: the head maps the line break that ends a prompt to REPLY[0], each of REPLY to the next,
    and the last to the end.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(words, normalized=False) for words in REPLY])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>",
        chat_template=CHAT,
    ).save_pretrained(folder)  # fmt: skip
    end, size = tokenizer.token_to_id("<|im_end|>"), tokenizer.get_vocab_size()
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=size,
            hidden_size=size + size % 2,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            eos_token_id=end,
            pad_token_id=end,
            tie_word_embeddings=False,
            max_position_embeddings=4096,
        )
    )
    spoken = [tokenizer.token_to_id(words) for words in REPLY]
    chain = [tokenizer.token_to_id("\u010a"), *spoken, end]  # U+010A stands for the line break
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(*model.model.embed_tokens.weight.shape))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for last, following in pairwise(chain):
            model.lm_head.weight[following, last] = 100.0
    model.save_pretrained(folder)


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
            wait_until_healthy(f"http://127.0.0.1:{port}", server, log, 300)
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
    section = ExternalConfig(mode="expert_edits", expert_model=model, expert_base_url=url)
    task = code_task("T/1", "def top(xs):\n    '''The largest of xs.'''\n", "", "top")
    texts = ("def aux(xs):\n    return xs\n", "def top(xs):\n    return 0\n")
    transition = external.find(section, CODE).build(Prompts(CODE))
    attempts = [Attempt(task, written, Score(0.0), 1) for written in (texts, texts[1:])]
    answers = transition(attempts)
    again = "Write a revised `{}`, code only: no fences, prose, tests or examples.\n"
    aux = f"Feedback:\nAn expert proposes for `aux`:\nSort `xs` first.\n{again.format('aux')}"
    top = f"Feedback:\nAn expert proposes for `top`:\nTake the last of them.\n{again.format('top')}"
    assert answers == [(aux, top), (top,)]
    assert transition.fallbacks.count == 0
