"""The nucleus without sorting a whole vocabulary, against the plain way."""

import pytest
import torch

from comlrl.rollout.truncation import PREFIXES, nucleus, truncated
from comlrl.types import Sampling


def plain(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Row by row: the likeliest tokens, one at a time, until the mass is reached."""
    left = torch.zeros_like(probabilities)
    for row, out in zip(probabilities.double(), left, strict=True):
        mass = 0.0
        for token in row.argsort(descending=True).tolist():
            if mass >= top_p * float(row.sum()):
                break
            out[token] = row[token]
            mass += float(row[token])
    return left


@pytest.mark.parametrize("vocabulary", [300, PREFIXES[-1], 3 * PREFIXES[-1]])
@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_the_smallest_set_is_found_however_flat_each_row_is(vocabulary, top_p):
    torch.manual_seed(0)
    # nuclei of a few tokens, of hundreds, of thousands and of nearly all, in one batch
    sharpness = torch.tensor([8.0, 4.0, 2.5, 1.0, 0.1, 6.0])[:, None]
    probabilities = torch.softmax(torch.randn(6, vocabulary) * sharpness, -1)

    found = nucleus(probabilities, top_p)

    assert torch.equal(found, plain(probabilities, top_p))


def test_mass_need_not_be_one():
    probabilities = torch.zeros(2, 2 * PREFIXES[-1])
    probabilities[0, [7, 5000, 8000]] = torch.tensor([0.2, 0.1, 0.1])  # of 0.4: 0.75 with two
    probabilities[1, 3] = 0.5

    found = nucleus(probabilities, 0.7)

    assert found[0].nonzero()[:, 0].tolist() in ([7, 5000], [7, 8000])
    assert found[1].nonzero()[:, 0].tolist() == [3]


def test_top_k_comes_first():
    probabilities = torch.softmax(torch.arange(9000.0).flip(0) / 10, -1)[None]

    found = truncated(probabilities, Sampling(1.0, 4, top_p=0.5, top_k=4))

    kept = probabilities[0, :4] / probabilities[0, :4].sum()
    expected = int((kept.cumsum(0) < 0.5).sum()) + 1
    assert found.nonzero()[:, 1].tolist() == list(range(expected))
