"""How an agent's rows become micro-batches, and how many of these run at once."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

from comlrl.models.fast.trie import Trie
from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import computed
from comlrl.processes.statistics import Sums
from comlrl.types import Row, TokenBatch
from comlrl.update import accumulate
from comlrl.update.accumulate import micro_batches
from tests.support.tiny_models import team


def row(size: int, number: int) -> Row:
    """Of so many computed tokens: a prompt of 10, and a completion whose last one is not."""
    letters = tuple(range(97, 97 + 26)) * (size // 26 + 1)
    return Row((number, *(98,) * 9), (letters[: size - 9],), (1.0,), (number,))


def sizes(rows: list[Row], most: int, **how: bool) -> list[int]:
    """Rows in each micro-batch."""
    with team().acting(0) as agent:
        return [len(batch.token_ids_RL) for batch in micro_batches(agent, rows, most, **how)]


def test_batches_are_of_like_size():
    rows = [row(100, n) for n in range(10)]
    assert [computed(r) for r in rows] == [100] * 10
    # 1,000 tokens in two of up to 900: not nine rows and one, but 500 each, up to 512.
    assert sizes(rows, 900) == [5, 5]
    assert sizes(rows, 1000) == [10]
    # 1,500 in two of up to 1,400: of 768 each, two rows go into one, and three batches come out; of
    # 1,024 three do.
    assert sizes([row(300, n) for n in range(5)], 1400) == [3, 2]
    assert sizes([row(500, n) for n in range(3)], 400) == [1, 1, 1]  # one completion at least
    assert sizes([], 400) == []


def test_what_prompts_begin_with_counts_once():
    """Ten rows of 100 computed tokens, of which 9 are common: 100 + 9 · 91 = 919."""
    rows = [replace(row(100, n), prompt_ids=(98,) * 10) for n in range(10)]
    assert sizes(rows, 919) == [10]
    assert sizes(rows, 918) == [5, 5]
    with team().acting(0) as agent:
        (batch,) = micro_batches(agent, rows, 919)
        assert Trie.from_batch(batch, last_tokens=False).count == 919
        agent.fast = None  # transformers' modules compute the 101 tokens of each row
        assert len(list(micro_batches(agent, rows, 1010))) == 1
        assert len(list(micro_batches(agent, rows, 1009))) == 2


def test_a_long_row_stays_whole_where_its_parts_would_read_its_prompt_again(monkeypatch):
    """A prompt of 100 with six completions of 40 that differ from their first token: 334 tokens."""
    letters = range(97, 103)
    one = Row((98,) * 100, tuple((n,) * 40 for n in letters), (1.0,) * 6, tuple(range(6)))
    assert computed(one) == 334
    monkeypatch.setitem(accumulate.MICRO_BATCH_TOKENS, "cpu", 256)
    with team().acting(0) as agent:
        whole = [b.token_ids_RL.shape[1] for b in micro_batches(agent, [one])]
        assert whole == [100 + 6 * 40]
        agent.micro_batch_tokens = 256  # memory has run out once: 100 + 4 · 39 = 256
        parts = [b.token_ids_RL.shape[1] for b in micro_batches(agent, [one])]
        assert parts == [100 + 4 * 40, 100 + 2 * 40]
        agent.micro_batch_tokens = None


def test_concurrent_ones_are_as_many_as_cores_share_evenly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accumulate, "worker_threads", lambda device: 4)
    rows = [row(100, n) for n in range(20)]
    # 2,000 tokens for four cores, 500 each.
    assert sizes(rows, 3000, concurrent=True) == [5, 5, 5, 5]
    # 300 each at most: eight, of 256 each, would hold two rows; of 300 three.
    assert sizes(rows, 300, concurrent=True) == [*[3] * 6, 2]


def test_all_rows_and_never_more_than_fits():
    draw = random.Random(3)
    with team().acting(0) as agent:
        for _ in range(30):
            rows = [row(draw.randint(11, 200), n) for n in range(draw.randint(1, 30))]
            most = draw.choice([200, 400, 1000])
            found = list(micro_batches(agent, rows, most))
            numbers = [n for batch in found for n in batch.completion_RL.unique().tolist()]
            assert sorted(n for n in numbers if n >= 0) == list(range(len(rows)))
            for batch in found:
                own = {n for n in batch.completion_RL.unique().tolist() if n >= 0}
                assert sum(computed(rows[n]) for n in own) <= most


def learned(rows: list[Row]) -> tuple[list[torch.Tensor], set[int]]:
    """Gradients of concurrent micro-batches, and the threads that found them."""
    threads = set()
    with team().acting(0) as agent:

        def loss(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
            threads.add(threading.get_ident())
            return action_logprobs(agent, batch, 1.0).logprob_A.sum(), Sums()

        accumulate.accumulate(agent, rows, loss, Sums(), concurrent=True)
        return [p.grad for p in agent.parameters()], threads


def test_worker_threads_sum_gradients_separately_as_far_as_memory_goes(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rows = [row(300, n) for n in range(4)]
    two, threads = learned(rows)
    assert threading.get_ident() not in threads
    # Two sums of the gradient, 4 bytes a number, would be one byte too many.
    monkeypatch.setattr(accumulate, "GRADIENT_SUM_BYTES", 2 * 4 * sum(g.numel() for g in two) - 1)
    one, threads = learned(rows)
    assert threads == {threading.get_ident()}
    for gradient, other in zip(one, two, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("memory", "tokens"), [(16, 4096), (8, 2048), (80, 8192), (None, 8192)])
def test_a_gpu_gives_a_quarter_of_its_memory(memory: int | None, tokens: int):
    each = 1 << 20  # bytes that a token leaves
    gib = None if memory is None else memory << 30
    assert accumulate.tokens_at_once("cuda", each, gib) == tokens
