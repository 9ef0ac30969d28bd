"""Evidence: what is observed, or known in part, as terms of the variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bethenet.graph import FactorGraph

UNOBSERVED = -1

Evidence = Mapping[Any, Any] | Tensor
"""Keys are numbers or names: to a type checker a ``dict[str, ...]`` would be no ``Mapping[int | str, ...]``."""

Terms = tuple[Float[Tensor, "batch variables states"], ...]
Observed = Int[Tensor, "batch variables"] | None


def with_evidence(graph: FactorGraph, terms: Terms, observed: Observed, evidence: Evidence) -> tuple[Terms, Observed]:
    """Node terms and observed states with more evidence; see `LogPotentials.clamp`."""
    if isinstance(evidence, Tensor):
        return _with_states(graph, terms, observed, evidence)
    if not isinstance(evidence, Mapping):
        raise ValueError(f"evidence is a mapping from variables, or a tensor of states; got {type(evidence).__name__}")
    states: dict[int, Tensor] = {}
    soft: dict[int, Tensor] = {}
    for variable, value in evidence.items():
        number = graph.variable_number(variable)
        try:
            tensor = torch.as_tensor(value, device=graph.device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"variable {number}: expected states or soft evidence, got {value!r}") from None
        (soft if tensor.is_floating_point() else states)[number] = tensor
    if states:
        terms, observed = _with_states(graph, terms, observed, _as_table(graph, states))
    for number, weights in soft.items():
        terms = _with_weights(graph, terms, number, weights)
    return terms, observed


def _as_table(graph: FactorGraph, states: Mapping[int, Tensor]) -> Int[Tensor, "batch variables"]:
    for number, tensor in states.items():
        if tensor.dim() > 1:
            raise ValueError(f"variable {number}: observed states have shape [] or [batch], got {tuple(tensor.shape)}")
    batch = max(tensor.numel() for tensor in states.values())
    table = torch.full((batch, graph.num_variables), UNOBSERVED, device=graph.device)
    for number, tensor in states.items():
        if tensor.numel() not in (1, batch):
            raise ValueError(f"variable {number}: expected 1 or {batch} observed states, got {tensor.numel()}")
        table[:, number] = tensor
    return table


def _with_states(graph: FactorGraph, terms: Terms, observed: Observed, states: Tensor) -> tuple[Terms, Observed]:
    states = states.to(graph.device)
    if states.dim() == 1:
        states = states.unsqueeze(0)
    variables = graph.num_variables
    if states.is_floating_point() or states.dim() != 2 or states.shape[1] != variables:
        raise ValueError(
            f"expected integer states of shape [{variables}] or [batch, {variables}], -1 where not observed; "
            f"got {states.dtype} of shape {tuple(states.shape)}"
        )
    wrong = (states < UNOBSERVED) | (states >= graph.state_counts)
    if wrong.any():
        member, variable = (int(i) for i in torch.nonzero(wrong)[0])
        raise ValueError(
            f"variable {variable}: expected a state from 0 to {int(graph.state_counts[variable]) - 1} "
            f"(or -1: not observed), got {int(states[member, variable])}"
        )
    _check_batch(terms, states.shape[0])
    result = []
    for term, group in zip(terms, graph.variable_groups, strict=True):
        seen = states[:, group.variables].unsqueeze(-1)
        allowed = (seen == UNOBSERVED) | (seen == torch.arange(group.states, device=graph.device))
        certainty = torch.zeros(allowed.shape, dtype=term.dtype, device=graph.device)
        result.append(term + certainty.masked_fill(~allowed, -math.inf))
    return tuple(result), states if observed is None else torch.where(states == UNOBSERVED, observed, states)


def _with_weights(graph: FactorGraph, terms: Terms, variable: int, weights: Tensor) -> Terms:
    number, row = graph.locate_variable(variable)
    group = graph.variable_groups[number]
    if weights.dim() not in (1, 2) or weights.shape[-1] != group.states:
        raise ValueError(
            f"variable {variable}: soft evidence has shape [{group.states}] or [batch, {group.states}], "
            f"got {tuple(weights.shape)}"
        )
    if not bool(((weights >= 0) & torch.isfinite(weights)).all()):
        raise ValueError(f"variable {variable}: soft evidence is non-negative and finite, got {weights.tolist()}")
    old = terms[number]
    weights = weights.to(old.dtype).reshape(-1, group.states)
    _check_batch(terms, weights.shape[0])
    new = old.expand(max(old.shape[0], weights.shape[0]), group.variables.numel(), group.states).clone()
    new[:, row] = new[:, row] + weights.log()
    return (*terms[:number], new, *terms[number + 1 :])


def _check_batch(terms: Terms, members: int) -> None:
    batch = max((term.shape[0] for term in terms), default=1)
    if batch > 1 and members not in (1, batch):
        raise ValueError(f"expected evidence for 1 or {batch} batch members, as there was before; got {members}")
