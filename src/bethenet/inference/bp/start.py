"""Messages that amount to given beliefs: how message passing continues from a network, or from another engine."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bethenet.beliefs import Beliefs
from bethenet.inference.bp.kernels import pack
from bethenet.inference.bp.problem import Problem, message_width
from bethenet.numerics import log_normalize


def messages_of(problem: Problem, beliefs: Beliefs) -> tuple[Float[Tensor, "batch slots width"], ...]:
    """Per variable group, messages as a state keeps them.

    A factor's belief is its table times one cavity a variable, and a message is the variable's belief divided by its
    cavity. Where beliefs have that form, as those of message passing and all consistent ones that minimise the free
    energy given their node marginals, the messages give them back. Otherwise the cavities are the nearest in the least
    squares of logarithms (of the possible entries; where there are impossible ones, nearly so). A message that would
    rule out a state says nothing instead.
    """
    messages = [part.transpose(0, 1).contiguous() for part in problem.uniform()]
    for number, group in enumerate(problem.graph.factor_groups):
        kernel = problem.kernels[number]
        if kernel is None:
            continue
        ratio = beliefs.factor_log_tables[number] - kernel.log_table.transpose(0, 1)
        for axis, slots in enumerate(problem.wiring.slots[number]):
            reader = group.variable_groups[axis]
            node = beliefs.node_log_tables[reader].index_select(1, group.rows[:, axis])
            message = log_normalize(node, -1) - _mean_over_others(ratio, axis)
            if problem.weights is not None:
                message = message * problem.weights[number].transpose(0, 1)
            narrow = message_width(group.table_shape[axis]) < group.table_shape[axis]
            message = pack(message) if narrow else log_normalize(message, -1)
            message = message.expand(problem.batch_size, -1, -1)
            messages[reader] = messages[reader].index_copy(1, slots.long(), message)
    return tuple(messages)


def _mean_over_others(ratio: Float[Tensor, "batch factors *table"], axis: int) -> Float[Tensor, "batch factors states"]:
    """The mean of the finite entries over all axes of the table but one; NaN where there are none."""
    others = [2 + other for other in range(ratio.dim() - 2) if other != axis]
    finite = torch.isfinite(ratio)
    return torch.where(finite, ratio, 0.0).sum(others) / finite.sum(others)
