"""Experiments: one file each, run with ``python -m bethenet.experiments.NAME``."""
