"""Every experiment by name: what ``bethenet reproduce`` takes."""

from __future__ import annotations

from importlib import import_module

from bethenet.experiments.runner import Experiment

EXPERIMENTS = {
    "table1": "bethenet.experiments.ising_tables:TABLE_1",
    "table2": "bethenet.experiments.ising_learning_tables:TABLE_2",
    "table3": "bethenet.experiments.rbm_tables:TABLE_3",
    "table4": "bethenet.experiments.hmm_tables:TABLE_4",
    "table5": "bethenet.experiments.ising_tables:TABLE_5",
    "amortized": "bethenet.experiments.amortized:AMORTIZED",
    "figure2": "bethenet.experiments.ising_tables:FIGURE_2",
    "states": "bethenet.experiments.hmm_states:LARGER",
}
"""Where each experiment is; it is imported when it is asked for."""


def experiment(name: str) -> Experiment:
    """An experiment by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"expected an experiment out of {', '.join(EXPERIMENTS)}; got {name!r}")
    module, attribute = EXPERIMENTS[name].split(":")
    found: Experiment = getattr(import_module(module), attribute)
    return found
