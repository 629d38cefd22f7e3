"""Packed rows, column by column; who sees whom; how rows are split and grouped."""

from __future__ import annotations

import random

import torch

from comlrl.models.rows import attention_mask, computed, pack, row_groups, split_rows, unpacked
from comlrl.types import Row, SamplingSupport

PAD = 99
ROWS = [
    Row((1, 2, 3), ((4, 5), (6,)), (0.1, -2.0), (7, 8)),
    Row((10,), ((11, 12),), (0.3,), (9,)),
]


def test_every_column_by_hand():
    batch = pack(ROWS, PAD)
    #                                     prompt   | first | second
    assert batch.token_ids_RL.tolist() == [[1, 2, 3, 4, 5, 6], [10, 11, 12, PAD, PAD, PAD]]
    # Each completion continues after the prompt: positions 3, 4 and again 3.
    assert batch.positions_RL[0].tolist() == [0, 1, 2, 3, 4, 3]
    assert batch.positions_RL[1, :3].tolist() == [0, 1, 2]
    assert batch.segment_RL.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 1, -1, -1, -1]]
    # 4 and 6 are both chosen by the prompt's last token, in column 2; 5 by 4, in column 3.
    assert batch.previous_RL[0, 3:].tolist() == [2, 3, 2]
    assert batch.previous_RL[1, 1:3].tolist() == [0, 1]
    # Every completion's token is an action, the last one too; nothing else is.
    assert batch.action_mask_RL.tolist() == [
        [False, False, False, True, True, True],
        [False, True, True, False, False, False],
    ]
    assert batch.weight_RL.tolist() == [[0, 0, 0, 0.1, 0.1, -2.0], [0, 0.3, 0.3, 0, 0, 0]]
    assert batch.completion_RL.tolist() == [[-1, -1, -1, 7, 7, 8], [-1, 9, 9, -1, -1, -1]]


def test_who_sees_whom():
    seen = attention_mask(pack(ROWS, PAD).segment_RL)[:, 0].int().tolist()
    assert seen[0] == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],  # the sibling is not seen
    ]
    assert seen[1][2] == [1, 1, 1, 0, 0, 0]
    # Nobody sees padding but padding's own row is not empty, so that no softmax is over nothing.
    assert [row[3:] for row in seen[1]] == [[0, 0, 0]] * 6
    assert all(any(row) for row in seen[1])


def _contents(rows):
    return sorted(
        (row.prompt_ids, ids, weight, index)
        for row in rows
        for ids, weight, index in zip(row.completions, row.weights, row.indices, strict=True)
    )


def _random_rows(count: int) -> list[Row]:
    draw = random.Random(count)
    rows = []
    for r in range(count):
        siblings = draw.randint(1, 5)
        completions = tuple(
            tuple(draw.randint(0, 50) for _ in range(draw.randint(1, 20))) for _ in range(siblings)
        )
        prompt = tuple(draw.randint(0, 50) for _ in range(draw.randint(1, 30)))
        weights = tuple(draw.uniform(-1, 1) for _ in range(siblings))
        rows.append(Row(prompt, completions, weights, tuple(range(10 * r, 10 * r + siblings))))
    return rows


def test_grouping_loses_and_doubles_nothing():
    rows = _random_rows(40)
    for limit in (1, 60, 200, 100_000):
        groups = list(row_groups(rows, limit))
        assert _contents(row for group in groups for row in group) == _contents(rows)
        for group in groups:
            padded = len(group) * max(row.length for row in group)
            assert padded <= limit or len(group) == 1
    assert len(list(row_groups(rows, 100_000))) == 1
    assert list(row_groups([], 10)) == []


def test_splitting_loses_and_doubles_nothing():
    rows = _random_rows(40)
    for limit in (1, 40, 70):
        parts = split_rows(rows, limit)
        assert _contents(parts) == _contents(rows)
        assert all(part.length <= limit or len(part.completions) == 1 for part in parts)
    assert split_rows(rows, 10_000) == rows


def test_common_beginnings_are_computed_once():
    assert computed(Row((1, 2, 3), (), (), ())) == 3
    # 3 of the prompt; 4 5 6, and 7 after 4 5, and 8; 4 5 is a beginning and 4 5 6 a copy. After
    # the last tokens, 9 here, nothing is chosen.
    completions = ((4, 5, 6, 9), (4, 5, 9), (4, 5, 7, 9), (8, 9), (4, 5, 6, 9))
    row = Row((1, 2, 3), completions, (1.0,) * 5, tuple(range(5)))
    assert computed(row) == 3 + 3 + 1 + 1
    # Up to 7 tokens: 3 + 3, with 4 5 still, with 7 after 4 5 just so; with 8 they would be 8.
    parts = split_rows([row], 7, shared=True)
    assert [part.completions for part in parts] == [completions[:3], completions[3:]]
    assert [computed(part) for part in parts] == [7, 3 + 1 + 3]
    assert split_rows([row], 8, shared=True) == [row]
    for limit, sizes in ((15, [1, 1]), (16, [2])):  # 8 each, while 3 + 17 are packed
        assert list(map(len, row_groups([row, row], limit, shared=True))) == sizes
    for limit, sizes in ((39, [1, 1]), (40, [2])):
        assert list(map(len, row_groups([row, row], limit))) == sizes


def test_grouping_and_splitting_by_what_is_computed():
    rows = _random_rows(40)
    for limit in (1, 40, 70, 500):
        parts = split_rows(rows, limit, shared=True)
        assert all(computed(part) <= limit or len(part.completions) == 1 for part in parts)
        groups = list(row_groups(parts, limit, shared=True))
        assert all(sum(map(computed, g)) <= limit or len(g) == 1 for g in groups)
        assert _contents(row for group in groups for row in group) == _contents(rows)


def test_unpacked_has_one_completion_a_row():
    rows = _random_rows(10)
    alone = unpacked(rows)
    assert _contents(alone) == _contents(rows)
    assert all(len(row.completions) == 1 for row in alone)


def test_an_action_for_each_token_of_each_completion():
    rows = _random_rows(30)
    batch = pack(rows, PAD)
    assert int(batch.action_mask_RL.sum()) == sum(len(c) for row in rows for c in row.completions)
    for r, row in enumerate(rows):
        for index, ids in zip(row.indices, row.completions, strict=True):
            own = batch.completion_RL[r] == index
            assert batch.token_ids_RL[r][own].tolist() == list(ids)
            assert bool(batch.action_mask_RL[r][own].all())
    assert torch.equal(batch.action_mask_RL, batch.completion_RL >= 0)


def test_what_truncation_left_goes_with_its_completion():
    def support(counts: list[int], first: int) -> SamplingSupport:
        ids = torch.arange(first, first + sum(counts), dtype=torch.int32)
        return SamplingSupport(torch.tensor(counts), ids, torch.full((len(counts),), float(first)))

    row = Row((1, 2), ((3,), (4, 5), (6,)), (1.0,) * 3, (0, 1, 2),
              support=(support([2], 10), support([0, 1], 20), support([1], 30)))  # fmt: skip
    whole = pack([row], PAD).support
    assert whole.counts_L.tolist() == [2, 0, 1, 1]
    assert whole.ids_I.tolist() == [10, 11, 20, 30]
    assert whole.threshold_L.tolist() == [10, 20, 20, 30]
    for parts in (split_rows([row], 5), unpacked([row])):
        assert [k for part in parts for k in part.support] == list(row.support)
    assert pack(split_rows([row], 5)[1:], PAD).support.ids_I.tolist() == [30]
    assert pack(_random_rows(3), PAD).support is None
