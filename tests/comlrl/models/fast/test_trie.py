"""What siblings share is computed once, and nothing above sees it."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from comlrl.models.fast import packed_attention
from comlrl.models.fast.packed_attention import (
    AttentionPlan,
    Gather,
    Grid,
    Packed,
    ReadOutputs,
    gather,
)
from comlrl.models.fast.prefix_cache import SharedPrefixCache
from comlrl.models.fast.trie import WORTH_SHARING, CommonBeginning, Trie
from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import computed, in_common, pack, unpacked
from comlrl.rollout.decoding import ByFastDecoder
from comlrl.types import Row
from tests.support.plain import near
from tests.support.shared_tokens import CASES, logprobs_and_gradients, numbered, row
from tests.support.tiny_models import EOS, PAD, prompt, team

HERE = torch.device("cpu")


# p :   a b c .   a b   a b d   |   q   a b   a b      (as letters)
BY_HAND = [row("p:", "abc.", "ab", "abd"), row("q", "ab", "ab")]


def ids(letters: str) -> list[int]:
    return [EOS if c == "." else prompt(c)[0] for c in letters]


def test_tokens_by_hand():
    #  2 + 4 + 1 tokens and 1 + 2
    trie = Trie.from_batch(pack(BY_HAND, PAD), last_tokens=True)
    # Prompts 0, 1 and 2; a, b, c, "." are 3 to 6 and d is 7; below the other prompt 8 and 9.
    assert trie.count == 2 + (4 + 1) + 1 + 2 == 10
    assert trie.token_RL.tolist() == [
        [0, 1, 3, 4, 5, 6, 3, 4, 3, 4, 7],
        [2, 8, 9, 8, 9, *[-1] * 6],
    ]
    assert trie.path_SC.tolist() == [[3, 4, 5, 6], [3, 4, 7, 0], [8, 9, 0, 0]]
    assert trie.lengths_S.tolist() == [4, 3, 2]
    assert trie.row_S.tolist() == [0, 0, 1]
    packed = Packed(pack(BY_HAND, PAD), HERE, 1, last_tokens=True)
    assert packed.ids_T.tolist() == ids("p:qabc.dab")
    assert packed.positions_T.tolist() == [0, 1, 0, 2, 3, 4, 5, 4, 1, 2]
    # First tokens are chosen by the prompts' last ones.
    assert packed.predictor_A.tolist() == [1, 3, 4, 5, 1, 3, 1, 3, 4, 2, 8, 2, 8]
    assert packed.token_A.tolist() == [3, 4, 5, 6, 3, 4, 3, 4, 7, 8, 9, 8, 9]
    # Queries × keys after 2 of the prompt: 3 · 4 · 6 = 72 in one grid; 2 · 3 · 5 + 24 = 54 in two.
    # Places 0 to 3: prompts, one padded; 4 to 9: 8 9 –, 3 4 7; 10 to 13: 3 4 5 6, of which 3 and 4
    # have been.
    all_tokens = packed.all_tokens
    assert all_tokens.shapes == [(2, 2, 2), (2, 3, 5), (1, 4, 6)]
    assert all_tokens.slot_of_row.tolist() == [0, 1, 2, 7, 8, 12, 13, 9, 4, 5]
    assert all_tokens.unread.tolist() == [3, 6, 10, 11]
    assert len(Packed(pack(BY_HAND, PAD), HERE, 256).ids_T) == 256


def test_last_tokens_are_not_computed_where_no_sibling_continues():
    #  2 tokens and a b c, of which "a" and "ab" are beginnings; 1 and a
    trie = Trie.from_batch(pack(BY_HAND, PAD), last_tokens=False)
    assert trie.count == 2 + 3 + 1 + 1 == sum(map(computed, BY_HAND))
    assert trie.token_RL.tolist() == [
        [0, 1, 3, 4, 5, -1, 3, -1, 3, 4, -1],
        [2, 6, -1, 6, *[-1] * 7],
    ]
    assert trie.path_SC.tolist() == [[3, 4, 5], [6, 0, 0]]
    packed = Packed(pack(BY_HAND, PAD), HERE, 1)
    assert packed.ids_T.tolist() == ids("p:qabca")
    assert packed.predictor_A.tolist() == [1, 3, 4, 5, 1, 3, 1, 3, 4, 2, 6, 2, 6]
    assert packed.targets_A.tolist() == ids("abc.ababdabab")  # all are chosen still
    alone = pack([row("p:", ".", "a")], PAD)  # of one token: the prompt chooses, that is all
    assert Trie.from_batch(alone, last_tokens=False).count == 2
    assert Packed(alone, HERE, 1).predictor_A.tolist() == [1, 1]


def test_the_last_layer_computes_only_what_is_read():
    packed = Packed(pack(BY_HAND, PAD), HERE, 1)
    assert packed.all_tokens.shapes == [(2, 2, 2), (1, 1, 3), (1, 3, 5)]
    # Of prompts the last tokens, 1 and 2, at slots 0 and 1; 6 at slot 2; 3 4 5 after it.
    read = packed.read(torch.tensor([1, 2, 3, 5, 6]), 8)
    assert read.shapes == [(2, 1, 2), (1, 1, 3), (1, 3, 5)]
    assert read.slot_of_row.tolist() == [0, 1, 3, 5, 2]
    assert read.unread.tolist() == [4]
    assert read.rows == 8
    with pytest.raises(AssertionError, match="inside prompts"):
        packed.read(torch.tensor([0]), 1)


def test_the_mask_of_a_grid():
    # A prompt of one token, where others have two, and two that follow.
    token_SK, key_mask_SK = torch.tensor([[0, 0, 1, 2]]), torch.tensor([[True, False, True, True]])
    grid = Grid(token_SK[:, 2:], key_mask_SK[:, 2:], token_SK, key_mask_SK)
    assert grid.mask().mask.long().tolist() == [[[[1, 0, 1, 0], [1, 0, 1, 1]]]]
    assert Grid.causal(token_SK, key_mask_SK).mask() is None


def test_outputs_are_read_at_one_slot_each():
    # Token 1 fills slots 0 and 2, 0 fills slot 1; slot 3 is padding; token 2 fills none.
    token_SC, real_SC = torch.tensor([[1, 0], [1, 0]]), torch.tensor([[True, True], [True, False]])
    plan = AttentionPlan.from_grids([Grid.causal(token_SC, real_SC)], 3, torch.tensor([0, 1]), 3)
    at_slots = torch.tensor([[1.0], [2.0], [4.0], [8.0]], requires_grad=True)
    where = plan.slot_of_row, plan.row_of_slot, plan.unread, plan.rows
    rows = ReadOutputs.apply(at_slots, *where)
    assert rows.tolist() == [[2.0], [1.0], [0.0]]
    (rows * torch.tensor([[10.0], [100.0], [1000.0]])).sum().backward()
    assert at_slots.grad.tolist() == [[100.0], [10.0], [0.0], [0.0]]


def test_prompts_alone_stay_in_their_order():
    rows = [row("p:"), row("longer:"), row("q")]
    packed = Packed(pack(rows, PAD), HERE, 1)
    assert packed.ids_T.tolist() == [*prompt("p:"), *prompt("longer:"), *prompt("q")]
    assert packed.completions == []


def test_a_token_gathered_twice_has_both_gradients():
    # Rows 2, 0, 2 and, as padding, 1: only the first three count.
    rows, padding = torch.tensor([2, 0, 2, 1]), torch.tensor([False, False, False, True])
    index = Gather.from_rows(rows, 4, padding)
    x = torch.arange(4.0, dtype=torch.float64)[:, None].requires_grad_()
    out = gather(x, index)
    assert out[:, 0].tolist() == [2, 0, 2, 1]
    (out[:, 0] * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    assert x.grad[:, 0].tolist() == [10, 0, 101, 0]


def test_short_ones_stand_in_a_grid_of_their_own():
    def grids(*lengths: int, before: int = 0) -> list[list[int]]:
        return [g.tolist() for g in packed_attention.length_groups(torch.tensor(lengths), before)]

    assert packed_attention.length_groups(torch.zeros(0, dtype=torch.long), 3) == []
    # Queries × keys: 4 · 10 · 10 = 400 together; 3 · 2 · 2 + 100 = 112 in two.
    assert grids(10, 2, 1, 2) == [[2, 1, 3], [0]]
    # 2 · 10 · 10 = 200; 9 · 9 + 100 = 181 are not worth it, 8 · 8 + 100 = 164 are.
    assert grids(10, 9) == [[1, 0]]
    assert grids(10, 8) == [[1], [0]]
    # After a prompt of 30: 2 · 10 · 40 = 800; 8 · 38 + 400 = 704 save 12 %.
    assert grids(10, 8, before=30) == [[1, 0]]


def is_plain(agents, rows: list[Row]) -> bool:
    """As through transformers' modules, a completion a row."""
    rows = numbered(rows)
    ours, plain = (
        logprobs_and_gradients(agents, rows, True),
        logprobs_and_gradients(agents, unpacked(rows), False),
    )
    return all(near(a, b, 1e-9) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all weights"])
def test_shared_tokens_are_computed_as_each_ones_own(kind, lora):
    agents = team(kind, lora__enabled=lora)
    assert agents.agents[0].fast.learning
    for name, rows in CASES.items():
        assert is_plain(agents, rows), name


def test_random_tries():
    agents = team()
    draw = random.Random(5)
    for _ in range(25):
        rows = []
        for _ in range(draw.randint(1, 4)):
            completions = ["".join(draw.choices("ab.", k=draw.randint(1, 7))) for _ in range(5)]
            start = "".join(draw.choices("ab", k=draw.randint(1, 5)))
            rows.append(row(start, *completions[: draw.randint(1, 5)]))
        trie = Trie.from_batch(pack(rows, PAD), last_tokens=False)
        beginnings = [{c[:n] for c in r.completions for n in range(1, len(c))} for r in rows]
        alone = sum(len(r.prompt_ids) + len(b) for r, b in zip(rows, beginnings, strict=True))
        assert alone == sum(map(computed, rows))
        prompts = [r.prompt_ids for r in rows]
        common = min(min(in_common(prompts[0], ids), len(ids) - 1) for ids in prompts)
        saved = common * (len(rows) - 1)
        assert trie.count == alone - saved * (saved >= WORTH_SHARING * sum(map(len, prompts)))
        assert is_plain(agents, rows)


# Of one agent a b c d and a b e; of another x y, x y z and x y.
BEGINNINGS = [row("abcd", "p."), row("abe", "p."), row("xy"), row("xyz"), row("xy")]


def test_a_common_beginning_by_hand():
    batch = pack(BEGINNINGS, PAD)
    # x y have x in common, since last tokens are never shared; so of a b c d and a b e one is.
    agent_R = torch.tensor([4, 4, 7, 7, 7])
    assert CommonBeginning.from_batch(batch, agent_R).length == 1
    assert CommonBeginning.from_batch(batch, agent_R).first_R.tolist() == [0, 0, 2, 2, 2]
    assert CommonBeginning.from_batch(batch).length == 0  # of one agent they have none
    assert CommonBeginning.from_batch(pack(BEGINNINGS[:2], PAD)).length == 2
    assert CommonBeginning.from_batch(pack(BEGINNINGS[:1], PAD)).length == 0  # nothing to save
    packed = Packed(batch, HERE, 1, agent_R=agent_R)
    assert packed.ids_T.tolist() == list(prompt("abcdbexyyzypp"))
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 1, 2, 0, 1, 1, 2, 1, 4, 3]
    assert packed.token_RL[:, :4].tolist() == [
        [0, 1, 2, 3], [0, 4, 5, 12], [6, 7, -1, -1], [6, 8, 9, -1], [6, 10, -1, -1],
    ]  # fmt: skip
    assert packed.tokens_P.tolist() == [4, 2, 2, 2, 1]
    assert packed.ends_P.tolist() == [3, 5, 7, 9, 10]
    # Prompts' queries after the beginnings, completions, and the two beginnings.
    assert packed.all_tokens.shapes == [(5, 3, 4), (2, 1, 5), (2, 1, 1)]


def test_little_in_common_is_computed_for_each():
    """A grid for one token of 34 does not pay."""
    rows = [row("a" + "b" * 16), row("a" + "c" * 16)]
    assert CommonBeginning.from_batch(pack(rows, PAD)).length == 0


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_prefill_shares_the_beginning_of_each_agents_prompts(dtype):
    """Each agent's adapter reads its own; last states and stored keys are as without sharing."""
    agents = team(dtype=dtype)
    texts = ["abcabcd", "abcabc", "abcabcdef", "xabcd", "xabef"]
    prompts, adapters = [prompt(text) for text in texts], [0, 0, 0, 1, 1]
    fast = agents.agents[0].fast
    names = [fast.names[number] for number in adapters]

    def read(chosen: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        of = [prompts[i] for i in chosen]
        cache = SharedPrefixCache(torch.tensor([len(ids) for ids in of]), 4)
        with fast.sampling():
            last_PD = ByFastDecoder(fast, cache, [names[i] for i in chosen]).prefill(of)
        return last_PD, [values[0] for layer in cache.prefix for values in layer]

    last_PD, stored = read([0, 1, 2, 3, 4])
    tolerance = 1e-12 if dtype == "float64" else 0.02
    for number in range(len(prompts)):
        assert near(last_PD[number], read([number])[0][0], tolerance)
    first, alone = stored[0], read([0])[1][0]
    assert near(first[..., : alone.shape[-1]], alone, tolerance)


def test_copies_say_exactly_the_same():
    agents = team(dtype="float32")
    with agents.acting(0) as agent, torch.no_grad():
        policy = action_logprobs(agent, pack([row("p:", "abc.", "b.", "abc.")], PAD), 1.0)
    assert torch.equal(policy.logprob_A[:4], policy.logprob_A[6:])


def test_a_token_sees_what_it_continues_and_nothing_else():
    """Texts in their order are the tree's tokens in pre-order."""
    for rows in [*CASES.values(), BY_HAND]:
        texts = set[tuple[int, tuple[int, ...]]]()
        for number, one in enumerate(rows):
            for completion in one.completions:
                text = (*one.prompt_ids, *completion)
                texts |= {(number, text[:length]) for length in range(1, len(text) + 1)}
        packed = Packed(pack(numbered(rows), PAD), HERE, 8, last_tokens=True, tree=True)
        ordered, count = sorted(texts), len(texts)
        assert packed.ids_T[:count].tolist() == [text[-1] for _, text in ordered]
        plan = packed.read(torch.arange(count), count)
        assert plan.visible().tolist() == [
            [mine == other and text[: len(start)] == start for other, start in ordered]
            + [False] * (len(packed.ids_T) - count)
            for mine, text in ordered
        ]
        assert packed.all_tokens.visible().any(1).all()  # padding sees itself: no NaN


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all weights"])
def test_one_mask_computes_what_the_grids_do(kind, lora):
    agents = team(kind, lora__enabled=lora)
    for rows in CASES.values():
        values = []
        for tree in (False, True):
            agents.agents[0].fast.tree = tree
            values.append(logprobs_and_gradients(agents, numbered(rows), True))
        assert all(near(a, b, 1e-11) for a, b in zip(*values, strict=True))


@torch.no_grad()
def test_flex_attention_takes_the_mask():
    """Uncompiled it runs on a CPU, without gradients; 200 tokens are more than a block."""
    rows = [row("p" * 90, "a" * 60 + "b", "a" * 40 + "c" * 9), row("q", "ab", first=2)]
    packed = Packed(pack(rows, PAD), HERE, 128, tree=True)
    assert len(packed.ids_T) == 256
    qkv_THW = torch.randn(256, 8, 16, generator=torch.Generator().manual_seed(0))
    query, key, value = (x.transpose(0, 1)[None] for x in qkv_THW.split((4, 2, 2), 1))
    for wanted_W in (torch.arange(256), torch.tensor([3, 95, 140])):
        plan = packed.read(wanted_W, len(wanted_W))
        out = flex_attention(
            query[:, :, wanted_W], key, value, block_mask=plan.blocks, scale=0.3, enable_gqa=True
        )
        assert near(out[0].transpose(0, 1).flatten(1), plan.attention(qkv_THW, 4, 2, 0.3), 1e-5)
