"""Models to and from pgmpy, which is imported only when one of these is called."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bethenet.formats.tables import explicit_factors
from bethenet.potentials import LogPotentials


def to_pgmpy(potentials: LogPotentials) -> Any:
    """A pgmpy ``DiscreteMarkovNetwork``, its variables named as the graph's (or numbered, where those have no names).

    pgmpy holds probabilities in float64: log-potentials beyond +-700 do not fit. It has no factors without variables,
    so those are multiplied into another; a variable in no factor is given a table of ones. Evidence becomes factors.

    Raises:
        ImportError: pgmpy is not installed.
        ValueError: a batch of several models, or a log-potential too large for a probability.
    """
    from pgmpy import models
    from pgmpy.factors.discrete import DiscreteFactor

    kind = getattr(models, "DiscreteMarkovNetwork", None) or models.MarkovNetwork
    graph = potentials.graph
    labels: list[Any] = list(graph.names) if graph.names is not None else list(range(graph.num_variables))
    scopes, tables = explicit_factors(potentials, cover=True)
    constant = sum(float(table) for scope, table in zip(scopes, tables, strict=True) if not scope)
    network, factors = kind(), []
    network.add_nodes_from(labels)
    for scope, table in zip(scopes, tables, strict=True):
        if not scope:
            continue
        log_table, constant = table.numpy() + constant, 0.0
        with np.errstate(over="ignore"):
            values = np.exp(log_table)
        if not np.isfinite(values).all():
            raise ValueError(f"a log-potential of {log_table.max():g} has no float64 to be its exponential")
        names = [labels[variable] for variable in scope]
        factors.append(DiscreteFactor(names, list(table.shape), values))
        network.add_edges_from((a, b) for i, a in enumerate(names) for b in names[i + 1 :])
    network.add_factors(*factors)
    return network


def from_pgmpy(network: Any) -> LogPotentials:
    """A model from a pgmpy Markov network, factor graph or Bayesian network, as float64; variables keep their names.

    Raises:
        ValueError: a negative or infinite entry.
    """
    if hasattr(network, "get_cpds"):
        factors = [cpd.to_factor() for cpd in network.get_cpds()]
    else:
        factors = list(network.get_factors())
    if hasattr(network, "get_cardinality"):
        sizes = dict(network.get_cardinality())
    else:
        sizes = {v: int(n) for factor in factors for v, n in zip(factor.scope(), factor.cardinality, strict=True)}
    number = {variable: position for position, variable in enumerate(sizes)}
    pairs = []
    for factor in factors:
        values = np.asarray(factor.values, dtype=np.float64)
        if not ((values >= 0) & np.isfinite(values)).all():
            raise ValueError(f"factor over {factor.scope()}: expected finite entries of at least 0")
        with np.errstate(divide="ignore"):
            pairs.append(([number[v] for v in factor.scope()], torch.from_numpy(np.array(np.log(values)))))
    names = [str(variable) for variable in sizes]
    return LogPotentials.from_factors([int(n) for n in sizes.values()], pairs, names, dtype=torch.float64)
