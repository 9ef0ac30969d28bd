"""Where engines over node marginals start, and how the best of several starts is chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.errors import ImpossibleEvidenceError
from bethenet.free_energy import free_energy
from bethenet.inference.engine import map_tensors
from bethenet.potentials import LogPotentials
from bethenet.result import InferenceResult


def local_evidence(potentials: LogPotentials) -> tuple[Float[Tensor, "batch variables states"], ...]:
    """For each variable group the sum of its unary log-potentials and node terms.

    Raises:
        ImpossibleEvidenceError: these alone leave a variable no state.
    """
    graph, batch = potentials.graph, potentials.batch_size
    totals = [
        term.expand(batch, group.variables.numel(), group.states).clone()
        for term, group in zip(potentials.node_terms, graph.variable_groups, strict=True)
    ]
    for group, table in zip(graph.factor_groups, potentials.tables, strict=True):
        if group.arity == 1:
            totals[group.variable_groups[0]].index_add_(1, group.rows[:, 0], table.expand(batch, len(group), -1))
    if potentials.has_zeros:
        for total, variables in zip(totals, graph.variable_groups, strict=True):
            impossible = (total == -torch.inf).all(-1)
            if bool(impossible.any()):
                member, row = (int(i) for i in torch.nonzero(impossible)[0])
                raise ImpossibleEvidenceError(
                    f"variable {int(variables.variables[row])} has no possible state (batch member {member})"
                )
    return tuple(totals)


def noisy_start(
    potentials: LogPotentials, noise: float, generator: torch.Generator | None, restarts: int = 1
) -> tuple[Float[Tensor, "batch variables states"], ...]:
    """Node logits: the local evidence plus normal noise, which breaks symmetries and tells restarts apart.

    The first start of each member (restarts lie together in the batch) gets a tenth of the noise: local evidence is the
    best single guess. Without a generator the noise is the same every time.
    """
    generator = generator or torch.Generator().manual_seed(0)  # one for all groups: their noise must differ
    scale = torch.full((potentials.batch_size, 1, 1), noise, dtype=potentials.dtype, device=potentials.device)
    scale[::restarts] *= 0.1
    return tuple(total + scale * normal_like(total, generator) for total in local_evidence(potentials))


def normal_like(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Independent standard normal numbers of a tensor's shape; without a generator the same ones every time."""
    generator = generator or torch.Generator().manual_seed(0)
    return torch.randn(like.shape, dtype=like.dtype, device=generator.device, generator=generator).to(like.device)


def best_of_restarts(
    run: Callable[[LogPotentials], InferenceResult], potentials: LogPotentials, restarts: int
) -> InferenceResult:
    """Run several starts of every member as one larger batch, and keep each member's result of largest log Z."""
    started = time.perf_counter()
    batch, device = potentials.batch_size, potentials.device
    constant = potentials.detach()[torch.arange(batch, device=device).repeat_interleave(restarts)]
    if batch == 1:
        # what is shared stays shared; only the node terms say how many members there are
        terms = [term[:1].expand(restarts, -1, -1) for term in constant.node_terms]
        constant = LogPotentials(constant.graph, constant.tables, terms, constant.observed)
    if constant.batch_size != batch * restarts:
        return run(potentials)  # no variables: every start is the same
    result = run(constant)
    log_z = result.log_z.nan_to_num(-torch.inf, posinf=-torch.inf).reshape(batch, restarts)
    best = log_z.argmax(1) + restarts * torch.arange(batch, device=device)
    beliefs = Beliefs(result.beliefs.regions, [table[best] for table in result.beliefs.log_tables])
    return replace(
        result,
        beliefs=beliefs,
        log_z=-free_energy(potentials, beliefs),
        member_status=tuple(result.member_status[member] for member in best.tolist()),
        iterations=result.iterations[best],
        residual=result.residual[best],
        seconds=time.perf_counter() - started,
        state=map_tensors(lambda tensor: tensor[best], result.state),
    )


def check_state(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], batch: int) -> None:
    """Refuse a state whose tensors have other shapes, or another batch than ``batch`` or 1.

    Raises:
        ValueError: it belongs to another graph or batch.
    """
    found = [tuple(tensor.shape) for tensor in tensors]
    if [shape[1:] for shape in found] != list(shapes) or any(shape[0] not in (1, batch) for shape in found):
        raise ValueError(
            f"state: expected tensors of shapes {list(shapes)} for a batch of {batch} (or 1), got {found}: it belongs "
            "to another graph or batch"
        )
