"""What the benchmark of a real shape rests on: completions that cannot end, rewards that differ."""

from __future__ import annotations

from transformers import AutoConfig, AutoTokenizer

from benchmarks.bench_real_shape import VOCABULARY, make_endless
from benchmarks.noise_reward import Noise
from comlrl.builtin import TINY_CODER
from comlrl.types import JointAction, Task


def test_every_token_has_a_text_and_none_is_the_end(tmp_path):
    make_endless(tmp_path, width=8, layers=1)
    ours, embedded = (AutoTokenizer.from_pretrained(f) for f in (tmp_path, TINY_CODER))
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == VOCABULARY == ours.eos_token_id
    assert all(ours.convert_ids_to_tokens(list(range(VOCABULARY))))
    assert ours.decode([17, 1200, VOCABULARY - 1, VOCABULARY], True) == "0w1200w151935"
    prompt = "def aux(a):\n    return w1200 + 5\n"
    assert ours(prompt)["input_ids"] == embedded(prompt)["input_ids"]


def test_noise_differs_between_completions_and_not_between_runs():
    task = Task("t", {})
    scores = Noise().score([JointAction(task, texts) for texts in (("a", "b"), ("ab", ""))])
    # CRC-32 of "a\0b", by `printf 'a\0b' | gzip -c | tail -c8 | od -An -tx4 -N4`: 15e87871.
    assert scores[0].value == 0x15E87871 / 2**32
    assert scores[1].value != scores[0].value
