"""Results as text: one JSON object, or the inference competitions' ``MAR``, ``PR`` and ``MPE`` files."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.result import InferenceResult


def describe(result: InferenceResult, *, node_marginals: bool, factor_marginals: bool) -> dict[str, Any]:
    """A result as JSON's types: one object, with a list ``members`` where the evidence held several samples."""
    nodes = node_tables(result.beliefs) if node_marginals else None
    factors = _factor_tables(result.beliefs) if factor_marginals else None
    members = []
    for number, status in enumerate(result.member_status):
        member: dict[str, Any] = {
            "status": str(status),
            "iterations": int(result.iterations[number]),
            "residual": float(result.residual[number]),
            "log_z": float(result.log_z[number]) + 0.0,  # minus zero becomes zero
        }
        if nodes is not None:
            member["node_marginals"] = nodes[number]
        if factors is not None:
            member["factor_marginals"] = factors[number]
        members.append(member)
    return join_members({"method": result.method, "status": str(result.status), "seconds": result.seconds}, members)


def join_members(common: dict[str, Any], members: list[dict[str, Any]]) -> dict[str, Any]:
    """What is said of all samples, and of the one, or of each in a list ``members``."""
    return {**common, **members[0]} if len(members) == 1 else {**common, "members": members}


def as_json(description: dict[str, Any]) -> str:
    """One line of JSON; numbers that are not finite, which JSON does not know, become null."""
    return json.dumps(_finite(description), allow_nan=False) + "\n"


def marginals_as_uai(beliefs: Beliefs) -> str:
    """A ``MAR`` file."""
    return _lines(
        "MAR",
        [
            " ".join([str(len(tables)), *(f"{len(table)} {' '.join(map(repr, table))}" for table in tables)])
            for tables in node_tables(beliefs)
        ],
    )


def log_z_as_uai(log_z: Tensor) -> str:
    """A ``PR`` file: log10 of the partition function, or of the evidence's probability in a Bayesian network."""
    return _lines("PR", [repr(value / math.log(10)) for value in log_z.double().tolist()])


def states_as_uai(states: Tensor) -> str:
    """An ``MPE`` file."""
    return _lines("MPE", [" ".join(map(str, [len(row), *row])) for row in states.tolist()])


def node_tables(beliefs: Beliefs) -> list[list[list[float]]]:
    """For each member each variable's marginal, as long as the variable has states."""
    tables: list[list[list[float]]] = [[[]] * beliefs.graph.num_variables for _ in range(beliefs.batch_size)]
    for logarithms, group in zip(beliefs.node_log_tables, beliefs.graph.variable_groups, strict=True):
        for member, rows in enumerate(logarithms.exp().tolist()):
            for variable, row in zip(group.variables.tolist(), rows, strict=True):
                tables[member][variable] = row
    return tables


def _factor_tables(beliefs: Beliefs) -> list[list[dict[str, Any]]]:
    scopes = beliefs.graph.scopes()
    tables: list[list[dict[str, Any]]] = [[{}] * len(scopes) for _ in range(beliefs.batch_size)]
    for marginals, group in zip(beliefs.factor_marginals, beliefs.graph.factor_groups, strict=True):
        for member, rows in enumerate(marginals.tolist()):
            for factor, row in zip(group.factors.tolist(), rows, strict=True):
                tables[member][factor] = {"scope": list(scopes[factor]), "table": row}
    return tables


def _lines(task: str, solutions: list[str]) -> str:
    """One solution stands alone; several come after their number, as in the older competitions."""
    counted = solutions if len(solutions) == 1 else [str(len(solutions)), *solutions]
    return "\n".join([task, *counted]) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        # long lists of numbers are looked at in one go
        if value and isinstance(value[0], float) and bool(torch.isfinite(torch.tensor(value)).all()):
            return value
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
