"""The engines by name: what ``--method`` takes."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

ENGINES = {
    "exact": "bethenet.inference.exact:Exact",
    "bp": "bethenet.inference.bp:BeliefPropagation",
    "trw": "bethenet.inference.trw:TreeReweighted",
    "gbp": "bethenet.inference.gbp:GeneralizedBeliefPropagation",
    "mean-field": "bethenet.inference.mean_field:MeanField",
    "descent": "bethenet.inference.descent:Descent",
    "network": "bethenet.networks.engine:NetworkInference",
}
"""Where each engine's class is; it is imported when it is asked for."""


def engine_class(method: str) -> type[Any]:
    """The class of an engine, a frozen dataclass of its options.

    Raises:
        ValueError: no engine has that name.
    """
    if method not in ENGINES:
        raise ValueError(f"expected a method out of {', '.join(ENGINES)}, got {method!r}")
    module, name = ENGINES[method].split(":")
    return getattr(import_module(module), name)


def option_names(method: str) -> list[str]:
    """The options that an engine has, by the engine's name."""
    return [field.name for field in fields(engine_class(method)) if field.init]


def make_engine(method: str, options: dict[str, Any]) -> Any:
    """An engine by name with those options that are not None.

    Raises:
        ValueError: no such engine, an option it does not have, or a value that the option cannot take.

    >>> make_engine("exact", {"memory_limit": 2**30, "damping": None}).memory_limit
    1073741824
    """
    known = option_names(method)
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in known:
            raise ValueError(f"the method {method!r} has no option {name!r}: its options are {', '.join(known)}")
    return engine_class(method)(**given)
