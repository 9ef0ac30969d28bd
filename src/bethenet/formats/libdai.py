"""libDAI's factor graph format (``.fg``): reading and writing.

A file holds the number of factors, then for each a block: its number of variables, their labels, their state counts,
the number of entries that follow, and those entries as pairs (index, value). The first variable's state changes
fastest with the index. An entry that is not listed is zero. ``#`` begins a comment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bethenet.formats.decimals import Floats, Integers
from bethenet.formats.tables import explicit_factors, from_flat_tables, tables_as_text
from bethenet.formats.text import Numbers, read_text, write_text
from bethenet.graph import MAX_ARITY, FactorGraph
from bethenet.potentials import LogPotentials

MAX_ENTRIES = 2**26
"""Entries of all tables together, listed or not (512 MiB): a few bytes of a sparse table can promise any number."""


@dataclass(frozen=True)
class _Blocks:
    """Where things stand in a file, factor by factor."""

    arities: Integers
    scopes: Integers
    """Where the labels begin; the state counts follow them."""
    entries: Integers
    """Where the entries begin."""
    listed: Integers
    """How many there are."""


def read_libdai(path: str | Path) -> LogPotentials:
    """A model from a libDAI file (perhaps gzipped), as float64.

    Variables are numbered in the order of their labels; where the labels are not 0, 1, 2 ..., they become names.

    Raises:
        ModelFileError: the file does not hold what the format promises; file and line are named.
        OSError: the file cannot be read.
    """
    return parse_libdai(path, read_text(path))


def parse_libdai(path: str | Path, text: bytes) -> LogPotentials:
    """A model from the text of a libDAI file; see `read_libdai`."""
    numbers = Numbers(path, text)
    blocks = _locate_blocks(numbers)
    ids = [np.flatnonzero(blocks.arities == arity) for arity in np.unique(blocks.arities).tolist()]
    labels = [_scope_positions(blocks, some) for some in ids]
    known, counts, scopes = _read_variables(numbers, labels)
    sizes = np.ones(blocks.arities.size)
    with np.errstate(over="ignore"):
        for some, scope in zip(ids, scopes, strict=True):
            sizes[some] = counts[scope].astype(np.float64).prod(axis=1)
    _check_sizes(numbers, blocks, sizes)
    _check_distinct(numbers, ids, labels)
    offsets = np.concatenate([[0], np.cumsum(sizes.astype(np.int64))])
    flat = np.full(int(offsets[-1]), -np.inf)
    cells, values = _read_entries(numbers, blocks, offsets)
    flat[cells] = numbers.require_potentials(values)
    names = None if np.array_equal(known, np.arange(known.size)) else [str(label) for label in known.tolist()]
    graph = FactorGraph.from_arrays(torch.from_numpy(counts), scopes, names, numbers=ids)
    return from_flat_tables(graph, flat, offsets[:-1], first_fastest=True)


def _locate_blocks(numbers: Numbers) -> _Blocks:
    factors, total = numbers.whole(0, "the number of factors"), len(numbers)
    # a block takes at least two numbers: those of its variables and of its entries
    numbers.require(1, 2 * factors, f"numbers or more, for {factors} factors")
    value, position = numbers.values.item, 1
    heads: list[Integers] = []
    arities, counts = np.empty(factors), np.empty(factors)
    known = factor = 0
    while factor < factors:
        if position >= known:
            known = numbers.read_to(position)
        arity = value(position) if position < total else -1.0
        if not (0 <= arity <= MAX_ARITY and arity.is_integer()):
            numbers.whole(position, f"the number of factor {factor}'s variables", 0, MAX_ARITY)
        if position + 1 + 2 * arity >= total:
            numbers.require(
                position + 1, 2 * arity + 1, f"labels, state counts and number of entries of factor {factor}"
            )
        entries = position + 2 + 2 * int(arity)
        if entries > known:
            known = numbers.read_to(entries - 1)
        listed = value(entries - 1)
        if not (listed >= 0 and listed.is_integer()):
            numbers.whole(entries - 1, f"the number of factor {factor}'s entries")
        if entries + 2 * listed > total:
            numbers.require(entries, 2 * listed, f"indices and values of factor {factor}'s entries")
        length = entries + 2 * int(listed) - position
        alike = _blocks_alike(numbers.values[position:known], length, entries - 1 - position, factors - factor)
        heads.append(position + length * np.arange(alike))
        arities[factor : factor + alike], counts[factor : factor + alike] = arity, listed
        position, factor = position + length * alike, factor + alike
    numbers.require_end(position)
    scopes = np.concatenate([*heads, np.empty(0, dtype=np.int64)])
    sizes = arities.astype(np.int64)
    return _Blocks(sizes, scopes + 1, scopes + 2 + 2 * sizes, counts.astype(np.int64))


def _blocks_alike(values: Floats, length: int, listed_at: int, most: int) -> int:
    """How many blocks, from the one that ``values`` begin with, have as many variables and entries as that one.

    Only those are counted that lie whole within ``values``, so that a file is read no further than it must be.
    """
    most = min(most, values.size // length)
    alike, window = 1, 1
    while alike < most:
        window = min(2 * window, most - alike)
        ahead = values[alike * length : (alike + window) * length].reshape(window, length)
        differs = np.flatnonzero((ahead[:, 0] != values[0]) | (ahead[:, listed_at] != values[listed_at]))
        if differs.size:
            return alike + int(differs[0])
        alike += window
    return alike


def _scope_positions(blocks: _Blocks, factors: Integers) -> Integers:
    """Where the labels of factors of one arity stand, ``[factors, arity]``."""
    positions: Integers = blocks.scopes[factors][:, None] + np.arange(blocks.arities[factors[0]])
    return positions


def _read_variables(
    numbers: Numbers, labels: Sequence[Integers]
) -> tuple[Integers, Integers, list[npt.NDArray[np.intp]]]:
    """(the labels there are, ascending; their variables' state counts; the scopes as places among those labels)."""
    empty = np.empty(0, dtype=np.int64)
    at = np.concatenate([*(positions.reshape(-1) for positions in labels), empty])
    # a scope's state counts follow its labels
    counts_at = np.concatenate([*((positions + positions.shape[1]).reshape(-1) for positions in labels), empty])
    label = numbers.wholes(at, "a variable's label")
    count = numbers.wholes(counts_at, "a state count", least=1)
    order = np.argsort(at, kind="stable")
    order = order[np.argsort(label[order], kind="stable")]
    label, count, counts_at = label[order], count[order], counts_at[order]
    same = label[1:] == label[:-1]
    differs = np.flatnonzero(same & (count[1:] != count[:-1]))
    if differs.size:
        one, other = differs[0], differs[0] + 1
        raise numbers.error(
            int(counts_at[other]),
            f"expected {count[one]}, the state count of variable {label[one]} above, found {count[other]}",
        )
    first = np.concatenate([np.ones(min(label.size, 1), dtype=bool), ~same])
    places = np.empty(label.size, dtype=np.intp)
    places[order] = np.cumsum(first) - 1
    ends = np.cumsum([positions.size for positions in labels], dtype=np.int64)
    scopes = np.split(places, ends[:-1]) if labels else []
    return (
        label[first],
        count[first],
        [some.reshape(positions.shape) for some, positions in zip(scopes, labels, strict=True)],
    )


def _check_sizes(numbers: Numbers, blocks: _Blocks, sizes: Floats) -> None:
    """No more entries than there are cells, and not too many cells; before anything is allocated."""
    many = np.flatnonzero(np.cumsum(sizes) > MAX_ENTRIES)
    if many.size:
        at = int(blocks.scopes[many[0]])
        raise numbers.error(at, f"expected tables of at most {MAX_ENTRIES} entries in all, found more")
    over = np.flatnonzero(blocks.listed > sizes)
    if over.size:
        factor = int(over[0])
        raise numbers.error(
            int(blocks.entries[factor]) - 1,
            f"expected at most {sizes[factor]:.0f} entries of factor {factor}, found {blocks.listed[factor]}",
        )


def _check_distinct(numbers: Numbers, ids: Sequence[Integers], labels: Sequence[Integers]) -> None:
    for some, positions in zip(ids, labels, strict=True):
        scopes = numbers.values[positions]
        ordered = np.sort(scopes, axis=1)
        repeated = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if repeated.size:
            row = repeated[0]
            found = " ".join(f"{label:.0f}" for label in scopes[row])
            raise numbers.error(
                int(positions[row, 0]), f"expected distinct variables in factor {some[row]}'s scope, found {found}"
            )


def _read_entries(numbers: Numbers, blocks: _Blocks, offsets: Integers) -> tuple[Integers, Integers]:
    """(cells in the flat array of all tables, positions of their values in the file)."""
    factor = np.repeat(np.arange(blocks.listed.size), blocks.listed)
    first = np.cumsum(blocks.listed) - blocks.listed
    positions = blocks.entries[factor] + 2 * (np.arange(factor.size) - first[factor])
    index = numbers.wholes(positions, "an entry's index")
    sizes = np.diff(offsets)[factor]
    outside = np.flatnonzero(index >= sizes)
    if outside.size:
        at = outside[0]
        raise numbers.error(
            int(positions[at]), f"expected an entry's index from 0 to {sizes[at] - 1}, found {index[at]}"
        )
    cells = offsets[factor] + index
    order = np.argsort(cells, kind="stable")
    again = np.flatnonzero(cells[order][1:] == cells[order][:-1])
    if again.size:
        at = order[again[0] + 1]
        raise numbers.error(int(positions[at]), f"expected each entry once, found index {index[at]} again")
    return cells, positions + 1


def write_libdai(potentials: LogPotentials, path: str | Path) -> None:
    """Write a ``.fg`` file, gzipped where the name ends in ``.gz``; reading it gives every table back bit for bit.

    The format knows variables by their factors only, so one that is in none is given a table of ones. Evidence is
    written as one more factor for each variable that has any. Labels are the variables' names where those are whole
    numbers in ascending order, else the variables' numbers.

    Raises:
        ValueError: a batch of several models, or a log-potential that no number stands for.
        OSError: the file cannot be written.
    """
    scopes, tables = explicit_factors(potentials, cover=True)
    labels = _labels(potentials.graph)
    counts = potentials.graph.state_counts.tolist()
    lines = [str(len(scopes))]
    for scope, entries in zip(scopes, tables_as_text(tables, first_fastest=True), strict=True):
        pairs = [f"{index} {entry}" for index, entry in enumerate(entries) if entry != "0"]
        lines += ["", str(len(scope)), " ".join(labels[v] for v in scope), " ".join(str(counts[v]) for v in scope)]
        lines += [str(len(pairs)), *pairs]
    write_text(path, "\n".join(lines) + "\n")


def _labels(graph: FactorGraph) -> list[str]:
    names = graph.names or ()
    numbers = [int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name]
    whole = len(numbers) == graph.num_variables and numbers == sorted(numbers)
    return list(names) if whole else [str(number) for number in range(graph.num_variables)]
