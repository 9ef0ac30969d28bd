"""The commands and their options."""

from __future__ import annotations

import io
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import bethenet
from bethenet.cli import results
from bethenet.cli.common import (
    Device,
    ExitCode,
    Failure,
    Precision,
    check_device,
    check_output,
    emit,
    generator_for,
    load,
    parse_bytes,
    reporting,
    say,
)
from bethenet.experiments.catalogue import EXPERIMENTS
from bethenet.experiments.catalogue import experiment as find_experiment
from bethenet.experiments.runner import Settings, run_experiment
from bethenet.formats import read_model, write_model
from bethenet.formats.text import write_bytes
from bethenet.inference.exact import Exact
from bethenet.inference.exact.memory import human
from bethenet.inference.registry import ENGINES, make_engine, option_names
from bethenet.networks.storage import load_network
from bethenet.potentials import LogPotentials
from bethenet.result import Status

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bethenet {bethenet.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Inference in discrete Markov random fields. Models are UAI or libDAI files, perhaps gzipped."""


class Task(StrEnum):
    """What to compute."""

    MARGINALS = "marginals"
    LOG_Z = "log-z"
    MAP = "map"


class OutputFormat(StrEnum):
    """How to write it."""

    JSON = "json"
    UAI = "uai"


ModelFile = Annotated[Path, typer.Argument(metavar="MODEL", help="A model: .uai or .fg, perhaps .gz.")]
EvidenceFile = Annotated[Path | None, typer.Option("--evidence", help="Observed states, a UAI evidence file.")]
DeviceOption = Annotated[Device, typer.Option(help="Where to compute.")]
DtypeOption = Annotated[Precision, typer.Option(help="Floating-point type.")]
MemoryLimit = Annotated[
    int | None,
    typer.Option("--memory-limit", parser=parse_bytes, metavar="BYTES", help="Refuse to take more, e.g. 8GiB."),
]
Seed = Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of whatever is random.")]
Output = Annotated[Path | None, typer.Option("--output", help="Write here instead of to stdout.")]


@app.command()
def infer(
    model: ModelFile,
    evidence: EvidenceFile = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}.")] = "exact",
    task: Annotated[Task, typer.Option(help="What to compute.")] = Task.MARGINALS,
    factors: Annotated[bool, typer.Option("--factors", help="Also the marginals of every factor.")] = False,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="How to write it.")] = OutputFormat.JSON,
    device: DeviceOption = Device.CPU,
    dtype: DtypeOption = Precision.FLOAT64,
    memory_limit: MemoryLimit = None,
    max_iterations: Annotated[int | None, typer.Option(help="Stop after so many iterations.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Stop at a residual of at most this.")] = None,
    damping: Annotated[float | None, typer.Option(help="How much of the old messages to keep.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop after so many seconds.")] = None,
    network: Annotated[
        Path | None, typer.Option("--network", metavar="DIR", help="A trained network, for --method network.")
    ] = None,
    seed: Seed = None,
    require_convergence: Annotated[
        bool, typer.Option("--require-convergence", help="Exit with 4 if the method did not converge.")
    ] = False,
    output: Output = None,
) -> None:
    """Marginals, log Z or the most probable state of a model, given evidence."""
    with reporting():
        check_output(output)
        check_device(device)
        options: dict[str, Any] = {
            "memory_limit": memory_limit,
            "max_iterations": max_iterations,
            "tolerance": tolerance,
            "damping": damping,
            "time_limit": time_limit,
            "network": network,
        }
        _check_options(method, options)
        if method == "network":
            if network is None:
                raise Failure("--method network needs a trained one: --network DIR")
            options["network"] = load_network(network, device.value, getattr(torch, dtype.value))
        engine = make_engine(method, options)
        if factors and (task is not Task.MARGINALS or output_format is OutputFormat.UAI):
            raise Failure("--factors goes with --task marginals and --format json")
        if task is Task.MAP:
            if require_convergence:
                raise Failure("--require-convergence goes with --task marginals and --task log-z")
            if not hasattr(engine, "map"):
                raise Failure(f"--task map: the method {method!r} does not find most probable states; exact does")
        potentials = load(model, evidence, device, dtype)
        if task is Task.MAP:
            emit(_most_probable(engine, method, potentials, output_format), output)
            return
        if task is Task.LOG_Z and isinstance(engine, Exact):
            emit(_exact_log_z(engine, potentials, output_format), output)
            return
        result = engine.run(potentials, generator=generator_for(seed))
        if bool(torch.isneginf(result.log_z).any()):
            raise Failure(f"{method} gives log Z = -inf: the evidence has probability zero, or its beliefs do")
        if output_format is OutputFormat.JSON:
            marginals = task is Task.MARGINALS
            description = results.describe(result, node_marginals=marginals, factor_marginals=factors)
            text = results.as_json(description)
        elif task is Task.MARGINALS:
            text = results.marginals_as_uai(result.beliefs)
        else:
            text = results.log_z_as_uai(result.log_z)
        emit(text, output)
        if result.status is not Status.CONVERGED:
            if result.status is not Status.PREDICTED or require_convergence:
                say(f"{method} did not converge: {result.status}, residual {float(result.residual.max()):.2g}")
            if require_convergence:
                raise typer.Exit(int(ExitCode.NOT_CONVERGED))


def _check_options(method: str, options: dict[str, Any]) -> None:
    known = option_names(method)
    for name, value in options.items():
        if value is not None and name not in known:
            flags = [_flag(option) for option in options if option in known]
            raise Failure(f"{_flag(name)}: the method {method!r} has no such option; it has {', '.join(flags)}")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _most_probable(engine: Any, method: str, potentials: LogPotentials, output_format: OutputFormat) -> str:
    started = time.perf_counter()
    states, values = engine.map(potentials)
    seconds = time.perf_counter() - started
    if output_format is OutputFormat.UAI:
        return results.states_as_uai(states)
    members = [
        {"map": state, "map_log_value": value} for state, value in zip(states.tolist(), values.tolist(), strict=True)
    ]
    return results.as_json(results.join_members({"method": method, "seconds": seconds}, members))


def _exact_log_z(engine: Exact, potentials: LogPotentials, output_format: OutputFormat) -> str:
    """Without the marginals, which would take more time and memory."""
    started = time.perf_counter()
    log_z = engine.log_z(potentials)
    seconds = time.perf_counter() - started
    if output_format is OutputFormat.UAI:
        return results.log_z_as_uai(log_z)
    status = str(Status.CONVERGED)
    members = [{"status": status, "iterations": 1, "residual": 0.0, "log_z": value} for value in log_z.tolist()]
    return results.as_json(results.join_members({"method": engine.name, "status": status, "seconds": seconds}, members))


@app.command()
def sample(
    model: ModelFile,
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="How many samples.")] = 1000,
    evidence: EvidenceFile = None,
    device: DeviceOption = Device.CPU,
    dtype: DtypeOption = Precision.FLOAT64,
    memory_limit: MemoryLimit = None,
    seed: Seed = None,
    output: Output = None,
) -> None:
    """Exact samples of a model, given evidence: one line of states a sample, or a .npy array (n x variables).

    Where the evidence file holds several samples, the array is n x evidence x variables, and a .npy file is needed.
    """
    with reporting():
        check_output(output)
        potentials = load(model, evidence, device, dtype)
        binary = output is not None and output.suffix == ".npy"
        if potentials.batch_size > 1 and not binary:
            raise Failure(
                f"the evidence holds {potentials.batch_size} samples: samples given each need --output FILE.npy"
            )
        engine = Exact(memory_limit=memory_limit)
        states = engine.sample(potentials, count, generator_for(seed, device.value)).cpu()
        if potentials.batch_size == 1:
            states = states[:, 0]
        if output is not None and binary:
            buffer = io.BytesIO()
            np.save(buffer, states.numpy())
            write_bytes(output, buffer.getvalue())
            say(f"wrote {' x '.join(map(str, states.shape))} states to {output}")
        else:
            emit("".join(" ".join(map(str, row)) + "\n" for row in states.tolist()), output)


@app.command()
def info(model: ModelFile, evidence: EvidenceFile = None) -> None:
    """How large a model is, and what exact inference in it would take."""
    with reporting():
        potentials = load(model, evidence, Device.CPU, Precision.FLOAT64)
        graph = potentials.graph
        rows = [("variables", str(graph.num_variables)), ("factors", str(graph.num_factors))]
        rows += [
            ("", f"{_count(group.variables.numel(), 'variable')} with {_count(group.states, 'state')}")
            for group in graph.variable_groups
        ]
        rows += [
            ("", f"{_count(len(group), 'factor')} with {' x '.join(map(str, group.table_shape)) or '1'} entries")
            for group in graph.factor_groups
        ]
        rows += _exact_cost(potentials)
        emit("".join(f"{name:<20}{value}".rstrip() + "\n" for name, value in rows), None)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _exact_cost(potentials: LogPotentials) -> list[tuple[str, str]]:
    engine = Exact()
    return [
        ("treewidth, at most", str(engine.width(potentials))),
        ("exact inference", f"{human(engine.predicted_bytes(potentials))} at its peak, for the marginals"),
    ]


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="FROM", help="A model: .uai or .fg, perhaps .gz.")],
    target: Annotated[Path, typer.Argument(metavar="TO", help="Where to write it: .uai or .fg, perhaps .gz.")],
) -> None:
    """Write a model in the format that the second name says; every table is kept bit for bit."""
    with reporting():
        check_output(target)
        write_model(read_model(source), target)


@app.command()
def reproduce(
    experiment: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(EXPERIMENTS)}.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small version, done in minutes on two cores.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many random models or repetitions.")] = None,
    device: DeviceOption = Device.CPU,
    output: Annotated[Path | None, typer.Option(help="A folder; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take over what a stopped run has finished.")] = False,
    data: Annotated[Path | None, typer.Option(help="A folder with data, for experiments that need one.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Compute these cells alone ('exact-*'); repeatable.")] = None,
) -> None:
    """Run an experiment: figures as JSON, a table beside the paper's, plots."""
    with reporting():
        found = find_experiment(experiment)
        folder = output or Path("runs") / experiment
        settings = Settings(
            folder, quick=quick, seeds=seeds, device=device.value, resume=resume, data=data, only=tuple(only or ())
        )
        check_device(device)
        try:
            written = run_experiment(found, settings)
        except KeyboardInterrupt:
            say(f"stopped; what is finished is kept in {folder}: go on with --resume")
            raise typer.Exit(130) from None
    for path in written:
        typer.echo(path)


def main() -> None:
    """Run the command line."""
    app()
