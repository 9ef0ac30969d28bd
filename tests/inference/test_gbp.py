"""Generalised belief propagation against enumeration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from oracle import enumerate_model, models

from bethenet import FactorGraph, LogPotentials
from bethenet.inference.gbp import GeneralizedBeliefPropagation


def check(potentials, result, tolerance):
    truth = enumerate_model(potentials)
    for variable in range(potentials.graph.num_variables):
        torch.testing.assert_close(
            result.beliefs.node_marginal(variable).double(), truth.marginal((variable,)), atol=tolerance, rtol=0
        )
    return truth


@settings(deadline=None, max_examples=40)
@given(models(batch=2, zeros=True))
def test_everything_in_one_cluster_is_exact(potentials):
    everything = [list(range(potentials.graph.num_variables))]
    result = GeneralizedBeliefPropagation(clusters=everything).run(potentials)
    truth = check(potentials, result, 1e-6)
    assert result.status == "converged"
    torch.testing.assert_close(result.log_z, truth.log_z, atol=1e-6, rtol=0)


@settings(deadline=None, max_examples=40)
@given(models(batch=2, zeros=True))
def test_anything_converges(potentials):
    result = GeneralizedBeliefPropagation().run(potentials)
    assert result.status == "converged"
    assert (result.beliefs.inconsistency() < 1e-5).all()
