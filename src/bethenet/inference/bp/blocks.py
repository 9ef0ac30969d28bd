"""Work on long tensors in blocks that stay in a processor's cache, several threads at a time.

A chain of elementwise operations on a tensor larger than the cache reads and writes main memory at every link. Done
block by block it reads once and writes once. Each block is one thread's: threads then meet once, at the end of the
chain, and not after every link of it, where on a busy machine they spend most of their time waiting for each other.
Between two operations a thread needs the interpreter, of which there is one: so blocks are not small either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

BLOCK_ENTRIES = 2**18
"""At most about so many numbers in a block."""
MULTIPLE = 64
"""A block's members are a multiple of this. Processors work on several numbers at once, and round those that are left
over in another way: so results do not depend on the number of threads."""

T = TypeVar("T")


def blocks(members: int, entries: int, sample: Tensor) -> list[slice]:
    """``members`` of so many entries each, in blocks of one size, as many for each thread; in one block where more are
    of no use: on an accelerator, or where gradients are recorded.
    """
    count = math.ceil(members * entries / BLOCK_ENTRIES)
    if count <= 1 or torch.is_grad_enabled() or not sample.is_cpu:
        return [slice(0, members)] if members else []
    threads = torch.get_num_threads()
    size = MULTIPLE * math.ceil(members / (MULTIPLE * threads * math.ceil(count / threads)))
    return [slice(first, min(first + size, members)) for first in range(0, members, size)]


def spare(tensor: Tensor) -> Tensor | None:
    """``out=spare(tensor)`` writes an operation's result over a tensor that nobody needs any more; into a new one where
    gradients are recorded.
    """
    return None if torch.is_grad_enabled() else tensor


class Workers:
    """As many threads as PyTorch uses itself, started when they are first needed and gone with this object."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None

    def each(self, task: Callable[[slice], T], parts: list[slice]) -> list[T]:
        """What ``task`` returns for each block, in no particular order. More than one block: no gradients."""
        if self._threads == 1 or torch.is_grad_enabled():
            return [task(part) for part in parts]
        with _operations_on_one_thread():
            return [task(part) for part in parts] if len(parts) < 2 else self._shared_out(task, parts)

    def _shared_out(self, task: Callable[[slice], T], parts: list[slice]) -> list[T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="bethenet")
        waiting = deque(parts)

        def work() -> list[T]:
            done: list[T] = []
            with torch.no_grad():  # a setting of each thread
                while True:
                    try:
                        part = waiting.popleft()
                    except IndexError:
                        return done
                    done.append(task(part))

        helpers = [self._pool.submit(work) for _ in range(self._threads - 1)]
        done = work()
        for helper in helpers:
            done += helper.result()
        return done


@contextmanager
def _operations_on_one_thread() -> Iterator[None]:
    """PyTorch leaves short operations to one thread; the libraries below it (MKL's exponentials) do not, unless told.

    A new thread takes the setting over when it first computes, so the pool's threads have it for good.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
