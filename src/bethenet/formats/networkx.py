"""Factor graphs as networkx graphs (the other way is `FactorGraph.from_networkx`)."""

from __future__ import annotations

from typing import Any

import networkx

from bethenet.graph import FactorGraph
from bethenet.potentials import LogPotentials


def to_networkx(model: FactorGraph | LogPotentials) -> networkx.Graph[Any]:
    """The bipartite graph of variables and factors.

    A variable's node is its name (its number where there are no names), with attributes ``bipartite=0`` and ``states``.
    A factor's node is ``("factor", number)``, with ``bipartite=1``, ``scope`` and, where the model has numbers,
    ``log_table`` ``[batch | 1, *table]``, without evidence. An edge's attribute ``axis`` is the table's axis.
    """
    graph = model.graph if isinstance(model, LogPotentials) else model
    labels: list[Any] = list(graph.names) if graph.names is not None else list(range(graph.num_variables))
    result: networkx.Graph[Any] = networkx.Graph()
    for label, states in zip(labels, graph.state_counts.tolist(), strict=True):
        result.add_node(label, bipartite=0, states=states)
    for factor, scope in enumerate(graph.scopes()):
        node = ("factor", factor)
        result.add_node(node, bipartite=1, scope=tuple(labels[variable] for variable in scope))
        if isinstance(model, LogPotentials):
            result.nodes[node]["log_table"] = model.table(factor).detach()
        result.add_edges_from((labels[variable], node, {"axis": axis}) for axis, variable in enumerate(scope))
    return result
