"""Decimal probabilities to log-potentials and back, without losing a bit.

Model files hold probabilities; this library holds their logarithms. Two things are lost if the way between them is
plain float64: a log-potential near 0 has more digits than a float64 near 1 can carry (1e-20 would come back as 0), and
one beyond +-745 has no float64 to stand for it at all. Decimal text has neither limit, so numbers are written with as
many digits as their logarithm needs, and read to the precision they are written in: a number of up to 17 significant
digits is a float64, and what a longer one says beyond its nearest float64 is added to the logarithm.
"""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

SHORT = 19
"""Characters of ``0.`` and 17 digits: nothing longer than this is a plain float64."""
LONGEST = 1000
"""Characters of the longest number that is read; the longest that is written has about 350."""
TABULAR = 46
"""Characters of the longest number that `_beyond_float64` takes: a digit, a point, and 44 digits. The logarithm of a
longer one is computed in decimal arithmetic, which is slow, and never a bit off."""
NUDGES = (0.0, 0.25, -0.25, 0.4, -0.4, 0.48, -0.48)
"""How far from a logarithm to aim, in units of its last place: next to a float64 whose own logarithm numpy rounds the
other way, only a number almost half a place off is read as the one wanted."""
NEAR_ONE = 1e-9
MAX_DIGITS = 9
"""Of a whole number that is read digit by digit."""
SMALLEST_NORMAL = float(np.finfo(np.float64).tiny)


def _context(digits: int) -> decimal.Context:
    # no traps: a number beyond even these exponents is infinite or zero, as it would be among float64s
    return decimal.Context(prec=digits, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[])


_EXACT = _context(2 * LONGEST)
_WORKING = _context(40)


def read_whole_numbers(text: bytes, starts: Integers, lengths: Integers) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(values of the tokens that are nothing but a few digits, which tokens those are).

    Most of what stands in a file of small tables: sizes, labels, indices.

    Args:
        text: where the tokens stand.
        starts: where each begins.
        lengths: of each, in characters.
    """
    characters = np.frombuffer(text, dtype=np.uint8)
    values = np.zeros(starts.size)
    whole = np.zeros(starts.size, dtype=bool)
    for width in range(1, MAX_DIGITS + 1):
        members = np.flatnonzero(lengths == width)
        if members.size:
            digits = characters[starts[members, None] + np.arange(width)] - np.uint8(ord("0"))
            plain = (digits <= 9).all(axis=1)
            values[members[plain]] = _integer(digits[plain])
            whole[members[plain]] = True
    return values, whole


def read_logarithms(tokens: Sequence[bytes], values: Floats, lengths: Integers | None = None) -> Floats:
    """Natural logarithms of decimal numbers; ``values`` are the same numbers as float64, ``lengths`` their characters.

    NaN where a number is negative or NaN, ``inf`` where it is infinite, ``-inf`` where it is zero.
    """
    if lengths is None:
        lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Floats = np.log(values)
    normal = (values >= SMALLEST_NORMAL) & np.isfinite(values) & (lengths <= TABULAR)
    _add_what_is_beyond(tokens, values, lengths, np.flatnonzero(normal & (lengths > SHORT)), result)
    # float64 loses these; unless they are written as zero, NaN or infinity, only the text knows them
    for position in np.flatnonzero(~normal & ~(values < 0) & (lengths > 4)).tolist():
        token = tokens[position]
        if not token.lower().partition(b"e")[0].strip(b"+-.0") or b"n" in token.lower():
            continue
        number = _EXACT.create_decimal(token.decode("ascii"))
        result[position] = np.nan if number.is_signed() else float(_WORKING.ln(number))
    return result


def _add_what_is_beyond(
    tokens: Sequence[bytes], values: Floats, lengths: Integers, wide: Integers, logarithms: Floats
) -> None:
    """Add to the logarithms at ``wide`` what those tokens say beyond float64."""
    if not wide.size:
        return
    rest = np.zeros(wide.size)
    done = np.zeros(wide.size, dtype=bool)
    widths = lengths[wide]
    # so near 1 the logarithm needs more digits than `_beyond_float64` carries
    tabular = np.abs(values[wide] - 1) > NEAR_ONE
    for width in np.unique(widths[tabular]).tolist():
        members = np.flatnonzero(tabular & (widths == width))
        block = np.frombuffer(b"".join([tokens[i] for i in wide[members].tolist()]), dtype=np.uint8)
        digits = np.delete(block.reshape(-1, width), 1, axis=1) - np.uint8(ord("0"))
        plain = (block[1::width] == ord(".")) & (digits <= 9).all(axis=1)
        chosen = members[plain]
        rest[chosen] = _beyond_float64(digits[plain], values[wide[chosen]])
        done[chosen] = True
    for member in np.flatnonzero(~done).tolist():
        number = _EXACT.create_decimal(tokens[wide[member]].decode("ascii"))
        rest[member] = float(_EXACT.subtract(number, decimal.Decimal(float(values[wide[member]]))))
    logarithms[wide] += np.log1p(rest / values[wide])


def _beyond_float64(digits: npt.NDArray[np.uint8], nearest: Floats) -> Floats:
    """Numbers ``d.ddd...``, given by their digits ``[numbers, digits]``, minus their nearest float64.

    The first 15 digits make an exact integer; dividing it by 1e14 leaves an exact remainder (Dekker's product).
    """
    head, middle, tail = (_integer(digits[:, part : part + 15]) for part in (0, 15, 30))
    scale = 1e14
    quotient = head / scale
    product = quotient * scale
    high_q, low_q = _split(quotient)
    high_s, low_s = _split(np.float64(scale))
    error = low_q * low_s - (((product - high_q * high_s) - low_q * high_s) - high_q * low_s)
    remainder = (head - product) - error
    decimals = digits.shape[1] - 1
    rest = middle * 10.0 ** -min(29, decimals) + tail * 10.0**-decimals
    return (quotient - nearest) + (remainder / scale + rest)


def _integer(digits: npt.NDArray[np.uint8]) -> Floats:
    result = np.zeros(len(digits))
    for column in range(digits.shape[1]):
        result = result * 10 + digits[:, column]
    return result


def _split(value: Any) -> tuple[Any, Any]:
    """Veltkamp's splitting: two halves whose products are exact in float64."""
    scaled = 134217729.0 * value  # 2^27 + 1
    high = scaled - (scaled - value)
    return high, value - high


def write_logarithms(logarithms: Floats) -> list[str]:
    """Decimal numbers whose logarithms, as `read_logarithms` reads them, are bit for bit the ones given.

    Raises:
        ValueError: a logarithm is NaN or ``+inf``, or beyond 2e18, where decimal text ends too.
    """
    logarithms = np.ascontiguousarray(logarithms, dtype=np.float64).reshape(-1)
    bad = ~(logarithms < np.inf) | ((np.abs(logarithms) > 2e18) & (logarithms != -np.inf))
    if bad.any():
        raise ValueError(f"expected log-potentials of at most 2e18 (or -inf) to write, got {logarithms[bad][0]}")
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        values: Floats = np.exp(logarithms)
        exact = _round_trips(values, logarithms)
        for neighbour in (np.nextafter(values, np.inf), np.nextafter(values, 0.0)):
            better = ~exact & _round_trips(neighbour, logarithms)
            values = np.where(better, neighbour, values)
            exact |= better
    result = list(map(repr, values.tolist()))
    for position in np.flatnonzero(logarithms == -np.inf).tolist():
        result[position] = "0"
    near = ~exact & (values >= SMALLEST_NORMAL) & np.isfinite(values) & (np.abs(values - 1) > NEAR_ONE)
    _write_wide(logarithms, values, np.flatnonzero(near), exact, result)
    for position in np.flatnonzero(~exact & np.isfinite(logarithms)).tolist():
        result[position] = _write_exactly(float(logarithms[position]))
    return result


def _round_trips(values: Floats, logarithms: Floats) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = (np.log(values) == logarithms) & (values >= SMALLEST_NORMAL) & np.isfinite(values)
    return same


def _write_wide(
    logarithms: Floats, values: Floats, wide: Integers, exact: npt.NDArray[np.bool_], result: list[str]
) -> None:
    """Write at ``wide`` numbers of more digits than a float64 has, and note in ``exact`` which read back exactly."""
    for nudge in NUDGES:
        wide = wide[~exact[wide]]
        goal, value = logarithms[wide], values[wide]
        rest = value * np.expm1(goal - np.log(value) + nudge * np.spacing(np.abs(goal)))
        decimals = 21 - np.floor(np.log10(np.abs(goal))).astype(np.int64)
        tokens = []
        for position, *parts, digits in zip(
            wide.tolist(), value.tolist(), rest.tolist(), decimals.tolist(), strict=True
        ):
            number = _EXACT.add(*map(decimal.Decimal, parts))
            result[position] = f"{number:.{digits}f}" if 0.25 < number < 8 else f"{number:.20e}"
            tokens.append(result[position].encode())
        exact[wide] = read_logarithms(tokens, np.array(list(map(float, tokens)))) == goal


def _write_exactly(logarithm: float) -> str:
    """A number of more than `TABULAR` characters."""
    digits = max(TABULAR + 2, 24 - int(decimal.Decimal(logarithm).adjusted()))
    context = _context(digits)
    return str(context.exp(decimal.Decimal(logarithm)))
