"""The UAI inference competitions' format: models (``MARKOV`` and ``BAYES``) and evidence; reading and writing.

A model file holds a word, the number of variables, their state counts, the number of factors, the scopes (a count and
that many variables each), and the tables (a count and that many numbers each, last variable fastest). ``BAYES`` reads
as ``MARKOV`` does: inference needs the product of the tables, whatever they are conditioned on.

Evidence stands in two layouts. The older one begins with the number of samples, then has one sample after another; the
newer has a single sample and no such number. A sample is a count and that many pairs (variable, state).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from bethenet.errors import ModelFileError
from bethenet.formats.decimals import Floats, Integers
from bethenet.formats.tables import explicit_factors, from_flat_tables, tables_as_text, unattached_states
from bethenet.formats.text import Numbers, first_word, read_text, write_text
from bethenet.graph import MAX_ARITY, FactorGraph
from bethenet.potentials import UNOBSERVED, LogPotentials

KINDS = ("MARKOV", "BAYES")

_LINE = re.compile(rb"[^\r\n]+")

MAX_EVIDENCE = 2**27
"""States of the variables, in all samples of an evidence file (1 GiB): each sample is a member of the batch, and a few
bytes of it say that nothing is observed of a large model."""


def read_uai(path: str | Path) -> LogPotentials:
    """A model from a UAI file (perhaps gzipped), as float64.

    Raises:
        ModelFileError: the file does not hold what the format promises; file and line are named.
        OSError: the file cannot be read.
    """
    return parse_uai(path, read_text(path))


def parse_uai(path: str | Path, text: bytes) -> LogPotentials:
    """A model from the text of a UAI file; see `read_uai`."""
    word, end, line = first_word(path, text)
    if word.strip("'").upper() not in KINDS:
        raise ModelFileError(path, line, f"expected {' or '.join(KINDS)}, found {word or 'the end of the file'}")
    numbers = Numbers(path, text, end)
    variables = numbers.whole(0, "the number of variables")
    numbers.require(1, variables, "state counts")
    counts = numbers.wholes(np.arange(1, 1 + variables), "a state count", least=1)
    factors = numbers.whole(1 + variables, "the number of factors")
    scopes, sizes, position = _read_scopes(numbers, 2 + variables, counts, factors)
    starts = _locate_tables(numbers, position, sizes)
    problem = unattached_states(counts, [scope for _, scope in scopes])
    if problem:
        raise numbers.error(1, problem)
    flat = numbers.logarithms
    numbers.require_potentials(slice(position, None))
    graph = FactorGraph.from_arrays(
        torch.from_numpy(counts), [scope for _, scope in scopes], numbers=[ids for ids, _ in scopes]
    )
    return from_flat_tables(graph, flat, starts)


def _read_scopes(
    numbers: Numbers, position: int, counts: Integers, factors: int
) -> tuple[list[tuple[Integers, Integers]], Floats, int]:
    """(the scopes of each arity with their factors' numbers, each factor's table size, where the tables begin)."""
    # a factor takes at least three numbers: those of its variables, of its entries, and one entry
    numbers.require(position, 3 * factors, f"numbers or more, for {factors} factors")
    heads, found = [], []
    value, variables, total = numbers.values.item, len(counts), len(numbers)
    most, known = min(variables, MAX_ARITY), 0
    for factor in range(factors):
        if position >= known:
            known = numbers.read_to(position)
        arity = value(position) if position < total else -1.0
        if not (0 <= arity <= most and arity.is_integer()):
            numbers.whole(position, f"the number of factor {factor}'s variables", 0, most)
        heads.append(position)
        found.append(arity)
        position += 1 + int(arity)
    starts, arities = np.array(heads, dtype=np.int64) + 1, np.array(found, dtype=np.int64)
    numbers.require(position, 0, "tables")
    if position > total:
        raise numbers.error(total, f"expected {factors} scopes, found the end of the file in the last of them")
    scopes, sizes = [], np.ones(factors)
    for arity in np.unique(arities).tolist():
        ids = np.flatnonzero(arities == arity)
        positions = starts[ids][:, None] + np.arange(arity)
        scope = numbers.wholes(positions, "a variable", 0, variables - 1)
        ordered = np.sort(scope, axis=1)
        repeated = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if repeated.size:
            factor = int(ids[repeated[0]])
            raise numbers.error(int(starts[factor]), f"expected distinct variables in factor {factor}'s scope, "
                                f"found {' '.join(map(str, scope[repeated[0]].tolist()))}")  # fmt: skip
        scopes.append((ids, scope))
        with np.errstate(over="ignore"):
            sizes[ids] = counts[scope].astype(np.float64).prod(axis=1)
    return scopes, sizes, position


def _locate_tables(numbers: Numbers, position: int, sizes: Floats) -> Integers:
    """Where each factor's entries begin; every count is checked against its scope before anything is allocated."""
    with np.errstate(over="ignore"):
        ends = position + np.cumsum(1 + sizes)
    heads = np.concatenate([[float(position)], ends[:-1]])[: sizes.size]
    there = np.flatnonzero(heads < len(numbers))
    found = numbers.at(heads[there].astype(np.int64))
    wrong = np.flatnonzero(found != sizes[there])
    if wrong.size:
        factor = int(there[wrong[0]])
        head = int(heads[factor])
        raise numbers.error(
            head, f"expected {sizes[factor]:.0f}, the number of factor {factor}'s entries, found {numbers.token(head)}"
        )
    if there.size < sizes.size:
        numbers.whole(len(numbers), f"the number of factor {there.size}'s entries")
    if sizes.size and ends[-1] > len(numbers):
        last = sizes.size - 1
        numbers.require(int(heads[last]) + 1, sizes[last], f"entries of factor {last}'s table")
    numbers.require_end(int(ends[-1]) if sizes.size else position)
    return heads.astype(np.int64) + 1


def write_uai(potentials: LogPotentials, path: str | Path) -> None:
    """Write a ``MARKOV`` file, gzipped where the name ends in ``.gz``; reading it gives every table back bit for bit.

    Evidence is written as one more factor for each variable that has any.

    Raises:
        ValueError: a batch of several models, or a log-potential that no number stands for.
        OSError: the file cannot be written.
    """
    scopes, tables = explicit_factors(potentials)
    counts = potentials.graph.state_counts.tolist()
    lines = ["MARKOV", str(len(counts)), " ".join(map(str, counts)), str(len(scopes))]
    lines += [" ".join(map(str, (len(scope), *scope))) for scope in scopes]
    for entries in tables_as_text(tables):
        lines += ["", str(len(entries)), " ".join(entries)]
    write_text(path, "\n".join(lines) + "\n")


def read_evidence(path: str | Path, graph: FactorGraph) -> Int[Tensor, "samples variables"]:
    """States of all variables, one row a sample, -1 where nothing is observed: what `LogPotentials.clamp` takes.

    A file that holds no sample gives one row in which nothing is observed.

    Raises:
        ModelFileError: the file does not fit the format or the graph; file and line are named.
        OSError: the file cannot be read.
    """
    text = read_text(path)
    numbers = Numbers(path, text)
    samples = numbers.whole(0, "the number of samples or of observed variables")
    single = len(numbers) == 1 + 2 * samples
    several = _sample_starts(numbers, samples)
    if several is None or (single and not _begin_lines(text, several)):  # some numbers fit both layouts
        several = [0]
        if not single:
            numbers.require(1, 2 * samples, "variables and states")
            numbers.require_end(1 + 2 * samples)
    entries = int(graph.state_counts.sum()) * len(several)
    if len(several) > 1 and entries > MAX_EVIDENCE:
        raise numbers.error(0, f"expected at most {MAX_EVIDENCE} states of variables in all samples, found {entries}")
    states = np.full((max(len(several), 1), graph.num_variables), UNOBSERVED, dtype=np.int64)
    row, variable, state = _read_samples(numbers, np.array(several, dtype=np.int64), graph)
    states[row, variable] = state
    return torch.from_numpy(states)


def _read_samples(numbers: Numbers, starts: Integers, graph: FactorGraph) -> tuple[Integers, Integers, Integers]:
    """(sample, variable, state) of every observation in the samples that begin at ``starts``."""
    lengths = numbers.at(starts).astype(np.int64)
    row = np.repeat(np.arange(len(starts)), lengths)
    first = np.cumsum(lengths) - lengths
    at = starts[row] + 1 + 2 * (np.arange(len(row)) - first[row])
    variable = numbers.wholes(at, "a variable", 0, graph.num_variables - 1)
    state = numbers.wholes(at + 1, "a state")
    most = graph.state_counts.numpy(force=True)[variable] - 1
    for wrong in np.flatnonzero(state > most).tolist():
        numbers.whole(int(at[wrong]) + 1, f"a state of variable {variable[wrong]}", 0, int(most[wrong]))
    cells = row * graph.num_variables + variable
    order = np.argsort(cells, kind="stable")
    again = np.flatnonzero(cells[order][1:] == cells[order][:-1])
    if again.size:
        wrong = order[again[0] + 1]
        found = f"found variable {variable[wrong]} again"
        raise numbers.error(int(at[wrong]), f"expected each variable once in a sample, {found}")
    return row, variable, state


def _sample_starts(numbers: Numbers, samples: int) -> list[int] | None:
    """Where each of ``samples`` samples begins in the older layout; None if the file is not laid out so."""
    starts: list[int] = []
    position, total = 1, len(numbers)
    while position < total and len(starts) < samples:
        starts.append(position)
        numbers.read_to(position)
        observed = numbers.values[position]
        if not (observed >= 0 and observed.is_integer()):
            numbers.whole(position, "the number of observed variables")
        position += 1 + 2 * int(observed)
    return starts if position == total and len(starts) == samples else None


def _begin_lines(text: bytes, positions: list[int]) -> bool:
    """Whether the numbers at all these positions are the first of their line."""
    missing, position = set(positions), 0
    for line in _LINE.finditer(text):
        missing.discard(position)
        position += len(line[0].split())
    return not missing


def write_evidence(
    evidence: Mapping[int, int] | Int[Tensor, "variables"] | Int[Tensor, "samples variables"],  # noqa: UP037
    path: str | Path,
) -> None:
    """Write evidence: a mapping from variables to states, or states with -1 where nothing is observed.

    One sample is written in the newer layout, any other number of them in the older.
    """
    if isinstance(evidence, Tensor):
        if evidence.dim() not in (1, 2) or evidence.is_floating_point():
            raise ValueError(
                f"expected integer states of shape [variables] or [samples, variables], got {evidence.dtype} of shape "
                f"{tuple(evidence.shape)}"
            )
        rows = evidence.reshape(-1, evidence.shape[-1]).tolist()
        samples = [{v: state for v, state in enumerate(row) if state != UNOBSERVED} for row in rows]
    else:
        samples = [dict(evidence)]
    lines = [" ".join(map(str, [len(one), *(n for pair in sorted(one.items()) for n in pair)])) for one in samples]
    write_text(path, "\n".join(lines if len(lines) == 1 else [str(len(lines)), *lines]) + "\n")
