"""How many bytes a plan needs at its peak, before anything is allocated; and how many there are.

The prediction goes through the plan as the passes do, and keeps account of what they hold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from enum import StrEnum

import torch

from bethenet.errors import MemoryLimitError
from bethenet.inference.exact.contraction import Contraction
from bethenet.inference.exact.elimination import kind_of
from bethenet.inference.exact.layout import Layout, Leaf
from bethenet.inference.exact.plan import Plan
from bethenet.inference.exact.reduction import Reduction

USABLE_SHARE = 0.8
"""Of the free memory, how much may be used by default."""

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

ALTERNATIVES = "bp, gbp, mean-field, trw, descent"


class Task(StrEnum):
    """What is to be computed: how much has to be kept."""

    LOG_Z = "log Z"
    """Messages are dropped as soon as they have been used."""
    SAMPLES = "samples"
    """All messages are kept."""
    BEST = "best state"
    """All messages are kept, and the given tables need no copy."""
    GRADIENT = "gradient"
    """Log Z, and its gradient in the log-potentials later."""
    MARGINALS = "marginals"
    """Log Z and all marginals."""
    EVERYTHING = "marginals and gradient"


class _Account:
    """What is held, by name, and the most there ever was; in entries."""

    def __init__(self) -> None:
        self.held: dict[object, float] = {}
        self.now = 0.0
        self.peak = 0.0

    def hold(self, name: object, entries: float) -> None:
        self.release(name)
        self.held[name] = entries
        self.now += entries
        self.peak = max(self.peak, self.now)

    def release(self, name: object) -> None:
        self.now -= self.held.pop(name, 0)

    def briefly(self, entries: float) -> None:
        self.peak = max(self.peak, self.now + entries)


def predict(plan: Plan, reduction: Reduction, layout: Layout, task: Task, itemsize: int, samples: int = 0) -> int:
    """Peak bytes of a task, without the potentials themselves; with so many ``samples`` drawn, or best states found."""
    batch, leaves = layout.batch, reduction.leaf_layouts(layout)
    mask = 1 / itemsize
    account = _Account()
    shared: dict[tuple[int, int], tuple[bool, bool]] = {}
    users = {}
    for stack, leaf in enumerate(leaves):
        entries = leaf.entries(batch)
        if leaf.fresh:
            account.hold(("given", stack), entries)
        copied = plan.permutations[stack] is not None and leaf.separate
        if task is Task.BEST:
            account.hold(stack, entries if copied or leaf.fresh else 0)
        else:
            account.briefly(entries * (2 + copied + mask))
            account.hold(stack, entries)
        account.release(("given", stack))
        shared |= dict.fromkeys(plan.uses[stack], (not leaf.batched, not leaf.separate))
        users[stack] = len(plan.uses[stack])
    kinds = []
    for number, step in enumerate(plan.rounds):
        kind = kind_of(step, [shared.pop((number, operand)) for operand in range(len(step.sources))], batch)
        result, stack = kind.result_entries, plan.leaves + number
        working = 4 * result if task is Task.BEST else max(kind.forward_entries(), result * (2 + mask))
        account.briefly(working)
        account.hold(stack, result)
        shape = kind.output_shape
        shared |= dict.fromkeys(plan.uses[stack], (shape[0] == 1, shape[1] == 1))
        users[stack] = len(plan.uses[stack])
        kinds.append(kind)
        for source in step.sources:
            users[source.stack] -= 1
            if not users[source.stack] and task is Task.LOG_Z:
                account.release(source.stack)
    if task in (Task.GRADIENT, Task.MARGINALS, Task.EVERYTHING):
        _backward(plan, kinds, leaves, batch, task, account, mask)
    if task in (Task.MARGINALS, Task.EVERYTHING):
        kept, besides = reduction.belief_entries(batch)
        account.hold("beliefs", kept)
        account.briefly(besides)
    if samples:
        _states(plan, samples * batch, reduction.graph.num_variables, account, 8 / itemsize)
    return int(account.peak * itemsize)


def _states(plan: Plan, members: int, variables: int, account: _Account, index: float) -> None:
    """Assignments of all variables for so many members, chosen round by round; an index takes ``index`` entries."""
    account.hold("states", members * variables * index)
    for step in plan.rounds:
        if step.variables.numel():
            choices, others = members * step.rows, len(step.sizes) - 1
            # the known states, each table's cells, and a handful of tables over the eliminated variable's states
            account.briefly(choices * (index * (others + 3) + 5 * step.sizes[0]))


def _backward(
    plan: Plan, kinds: list[Contraction], leaves: Sequence[Leaf], batch: int, task: Task, account: _Account, mask: float
) -> None:
    full = task is not Task.GRADIENT
    first_use: dict[int, int] = {}
    for number in range(len(plan.rounds) - 1, -1, -1):
        for source in plan.rounds[number].sources:
            first_use[source.stack] = number
    for number in range(len(plan.rounds) - 1, -1, -1):
        step, kind, stack = plan.rounds[number], kinds[number], plan.leaves + number
        top = kind.entries({*(kind.full if full else ()), *kind.output})
        if len(plan.uses[stack]) > 1:
            account.briefly(top)
        for use in plan.uses[stack]:
            account.release(use)
        account.hold("gradient", top)
        account.briefly(top * (1 + mask))
        account.release("gradient")
        account.briefly(kind.backward_entries(full=full))
        for operand, source in enumerate(step.sources):
            size = kind.gradient_entries(operand, full=full)
            if source.stack >= plan.leaves:
                account.hold((number, operand), size)
            elif full:
                leaf = leaves[source.stack]
                account.hold(("out", source.stack), batch * leaf.rows * math.prod(leaf.table_shape))
                account.briefly(size * (2 + mask))
            else:
                account.hold((number, operand), size)
        if task is Task.MARGINALS:
            account.release(stack)
            for source in step.sources:
                if first_use[source.stack] == number:
                    account.release(source.stack)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def human(number: int) -> str:
    """Bytes with a unit."""
    if number < 1024:
        return f"{number} bytes"
    power = min((number.bit_length() - 1) // 10, len(UNITS))
    if number >> (10 * power) >= 10_000:
        return f"10^{math.log10(number):.0f} bytes"
    return f"{number / 1024**power:.4g} {UNITS[power - 1]}"


def refuse(needed: int, allowed: int, width: int, task: Task) -> MemoryLimitError:
    """The error that says what would have been needed, and what else there is."""
    return MemoryLimitError(
        f"exact inference ({task}) would need {human(needed)} at its peak and may take {human(allowed)}: the best "
        f"elimination order found has width {width}. Raise memory_limit, observe more variables, or use an approximate "
        f"engine: {ALTERNATIVES}",
        bytes_needed=needed,
        bytes_allowed=allowed,
        width=width,
    )
