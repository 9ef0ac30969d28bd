"""A log-potential written as a decimal probability comes back bit for bit."""

import decimal
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bethenet.formats.decimals import read_logarithms, write_logarithms


def read(texts):
    tokens = [text.encode() for text in texts]
    return read_logarithms(tokens, np.array([float(token) for token in tokens]))


def bits(values):
    return (np.asarray(values, dtype=np.float64) + 0.0).view(np.int64).tolist()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(min_value=-2e18, max_value=2e18, allow_nan=False) | st.just(-math.inf), max_size=8))
def test_round_trip_keeps_every_bit(values):
    logarithms = np.array(values, dtype=np.float64)
    assert bits(read(write_logarithms(logarithms))) == bits(logarithms)


@pytest.mark.parametrize("spread", [1e-300, 1e-17, 1e-10, 1e-3, 1.0, 30.0, 1e4])
def test_many_random_logarithms_round_trip(spread):
    logarithms = np.random.default_rng(0).normal(size=4000) * spread
    assert bits(read(write_logarithms(logarithms))) == bits(logarithms)


def test_what_is_written_is_the_exponential():
    # not merely something that our own reader takes for it
    logarithms = np.random.default_rng(1).normal(size=200) * np.repeat([1e-12, 1e-3, 1.0, 50.0, 5000.0], 40)
    with decimal.localcontext(decimal.Context(prec=60)):
        for logarithm, text in zip(logarithms.tolist(), write_logarithms(logarithms), strict=True):
            true = decimal.Decimal(logarithm).exp()
            last_place = decimal.Decimal(float(np.spacing(abs(logarithm))))
            assert abs(decimal.Decimal(text) / true - 1) < 2 * last_place + decimal.Decimal("3e-16") * (
                abs(logarithm) > 1
            )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 0.0),
        ("+1.5E+0", math.log(1.5)),
        (".5", math.log(0.5)),
        ("0", -math.inf),
        ("-0.0", -math.inf),
        ("0e-999999", -math.inf),
        ("0." + "0" * 400, -math.inf),
        ("1e-400", -400 * math.log(10)),
        ("1e+400", 400 * math.log(10)),
        ("0." + "0" * 399 + "1", -400 * math.log(10)),
        ("1" + "0" * 400, 400 * math.log(10)),
        ("1.00000000000000000001", 1e-20),
        ("0.99999999999999999999", -1e-20),
        ("1.0000000000000000000100e0", 1e-20),
        ("00001.00000000000000000001", 1e-20),
        ("2.5000000000000000000000000", math.log(2.5)),
    ],
)
def test_numbers_as_they_are_written_by_others(text, expected):
    assert read([text])[0] == pytest.approx(expected, rel=1e-15, abs=0)


def test_vectorised_and_exact_reading_agree():
    # the same numbers, once as `d.ddd` (tables) and once with an exponent (one by one)
    generator = np.random.default_rng(2)
    digits = ["".join(map(str, generator.integers(0, 10, size=n))) for n in generator.integers(18, 43, size=500)]
    plain = [f"{i % 10}.{some}" for i, some in enumerate(digits)]
    assert bits(read(plain)) == bits(read([text + "e0" for text in plain]))


@pytest.mark.parametrize("text", ["-1", "nan", "-1e-400", "-1e-9999999999999999999", "-0." + "0" * 400 + "1", "-inf"])
def test_what_is_no_probability_is_nan(text):
    assert math.isnan(read([text])[0])


def test_infinity_stays_infinite():
    assert read(["inf"])[0] == read(["infinity"])[0] == math.inf


def test_exponents_beyond_all_arithmetic():
    assert read(["1e9999999999999999999", "1e-9999999999999999999"]).tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e19])
def test_what_no_decimal_number_stands_for_is_refused(value):
    with pytest.raises(ValueError, match="expected log-potentials of at most 2e18"):
        write_logarithms(np.array([0.0, value]))
