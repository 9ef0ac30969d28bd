import math

import pytest
import torch

from bethenet import ImpossibleEvidenceError
from bethenet.models import chain_paths
from bethenet.models.chain_paths import best_path, sample_paths
from chains import path_scores, random_tables, random_unary

KINDS = ["pairwise", "full"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("order", "states"), [(1, 3), (2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("chunk", [2**26, 1])
def test_the_best_path_is_the_best(kind, order, states, chunk, monkeypatch):
    monkeypatch.setattr(chain_paths, "_CHUNK", chunk)
    numbers, tables = random_tables(kind, order, states)
    unary = random_unary(5, 6, states).detach()
    lengths = torch.tensor([6, 1, 3, 5, 6])
    found, value = best_path(unary, tables.detach(), lengths)
    for row, length in enumerate(lengths.tolist()):
        paths, scores = path_scores(kind, numbers.detach(), unary[row : row + 1, :length])
        assert found[row, :length].tolist() == paths[scores[0].argmax()].tolist()
        assert (found[row, length:] == 0).all()
        torch.testing.assert_close(value[row], scores[0].max())
    whole, _ = best_path(unary, tables.detach())
    assert torch.equal(whole[0], found[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("order", "states"), [(1, 3), (2, 2), (3, 2)])
def test_samples_come_from_the_posterior(kind, order, states):
    numbers, tables = random_tables(kind, order, states)
    unary = random_unary(2, 4, states).detach()
    count = 40_000
    drawn = sample_paths(unary, tables.detach(), samples=count, generator=torch.Generator().manual_seed(3))
    paths, scores = path_scores(kind, numbers.detach(), unary)
    probabilities = scores.softmax(1)
    powers = states ** torch.arange(3, -1, -1)
    assert torch.equal((paths * powers).sum(1), torch.arange(len(paths)))
    for row in range(2):
        share = torch.bincount((drawn[:, row] * powers).sum(1), minlength=len(paths)) / count
        error = (probabilities[row] * (1 - probabilities[row]) / count).sqrt()
        assert ((share - probabilities[row]).abs() < 5 * error + 1e-9).all()


def test_samples_of_padded_chains():
    numbers, tables = random_tables("pairwise", 2, 3)
    unary = random_unary(3, 5, 3).detach()
    lengths = torch.tensor([2, 5, 1])
    drawn = sample_paths(unary, tables.detach(), lengths, samples=20_000, generator=torch.Generator().manual_seed(0))
    _paths, scores = path_scores("pairwise", numbers.detach(), unary[:1, :2])
    share = torch.bincount((drawn[:, 0, :2] * torch.tensor([3, 1])).sum(1), minlength=9) / 20_000
    assert (share - scores[0].softmax(0)).abs().max() < 0.02
    assert (drawn[:, 0, 2:] == 0).all()
    assert (drawn[:, 2, 1:] == 0).all()


def test_samples_avoid_the_impossible_and_say_so_where_all_is():
    _, tables = random_tables("pairwise", 2, 3)
    unary = random_unary(2, 4, 3).detach()
    unary[:, 1, 2] = -math.inf
    drawn = sample_paths(unary, tables.detach(), samples=500, generator=torch.Generator().manual_seed(0))
    assert (drawn[:, :, 1] != 2).all()
    unary[0, 1] = -math.inf
    with pytest.raises(ImpossibleEvidenceError):
        sample_paths(unary, tables.detach())
