import json
import math
import os

import pytest

import bethenet
from bethenet.experiments.catalogue import EXPERIMENTS, experiment
from bethenet.experiments.runner import (
    Cell,
    Experiment,
    Settings,
    environment,
    markdown_table,
    mean_and_error,
    run_experiment,
    write_json,
    write_text,
)


class Squares:
    """An experiment that counts how often each cell was computed; a cell may be told to fail."""

    def __init__(self, numbers=(1, 2, 3), fails=None, scale=1):
        self.numbers, self.fails, self.scale = numbers, fails, scale
        self.computed = []

    def cells(self, settings):
        return [
            Cell(f"square-{number}", {"number": number, "scale": self.scale}, lambda number=number: self.run(number))
            for number in self.numbers
        ]

    def run(self, number):
        if number == self.fails:
            raise RuntimeError("interrupted")
        self.computed.append(number)
        return {"square": self.scale * number**2}

    def report(self, settings, figures):
        path = settings.output / "squares.md"
        write_text(path, " ".join(str(cell["square"]) for cell in figures.values()))
        return [path]

    def go(self, path, **settings):
        return run_experiment(Experiment("squares", "Squares", self.cells, self.report), Settings(path, **settings))


def test_all_cells_are_computed_recorded_and_reported(tmp_path):
    output = tmp_path / "new" / "folder"
    squares = Squares()
    report, record = squares.go(output, quick=True)
    assert squares.computed == [1, 2, 3]
    assert report.read_text() == "1 4 9"
    content = json.loads(record.read_text())
    assert (content["experiment"], content["title"], content["quick"]) == ("squares", "Squares", True)
    cell = content["cells"]["square-3"]
    assert cell["square"] == 9
    assert cell["settings"] == {"number": 3, "scale": 1}
    assert cell["version"] == bethenet.__version__
    assert cell["seconds"] >= 0
    assert cell["environment"]["device"] == "cpu"


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path):
    stopped = Squares(fails=3)
    with pytest.raises(RuntimeError, match="interrupted"):
        stopped.go(tmp_path)
    assert not (tmp_path / "squares.json").exists()
    again = Squares()
    report, _ = again.go(tmp_path, resume=True)
    assert again.computed == [3]
    assert report.read_text() == "1 4 9"


def test_without_resume_everything_is_computed_again(tmp_path):
    Squares().go(tmp_path)
    again = Squares()
    again.go(tmp_path)
    assert again.computed == [1, 2, 3]


def test_some_cells_alone_are_computed_and_the_finished_ones_taken_over(tmp_path, caplog):
    first = Squares()
    (record,) = first.go(tmp_path, only=("square-2",))
    assert first.computed == [2]
    assert json.loads(record.read_text())["missing"] == ["square-1", "square-3"]
    assert "square-1, square-3" in caplog.text
    second = Squares()
    report, record = second.go(tmp_path, only=("*-1", "*-3"))
    assert second.computed == [1, 3]
    assert report.read_text() == "1 4 9"
    content = json.loads(record.read_text())
    assert content["missing"] == []
    assert list(content["cells"]) == ["square-1", "square-2", "square-3"]
    # what is named is computed again unless the run is resumed
    third = Squares()
    third.go(tmp_path, only=("*-1",))
    third.go(tmp_path, only=("*-1",), resume=True)
    assert third.computed == [1]
    with pytest.raises(ValueError, match=r"only: expected patterns of some of square-1, .*; got triangle"):
        Squares().go(tmp_path, only=("triangle",))


def test_a_report_that_can_says_what_is_missing(tmp_path):
    squares = Squares()
    described = Experiment("squares", "Squares", squares.cells, squares.report, partial=True)
    report, _ = run_experiment(described, Settings(tmp_path, only=("square-3",)))
    assert report.read_text() == "9"


def test_a_cell_can_say_how_far_it_is(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("rich.progress.Progress.update", lambda *_, **what: shown.append(what.get("description")))

    def cells(settings):
        return [Cell("only", {}, lambda: settings.tell("half") or {})]

    run_experiment(Experiment("slow", "Slow", cells, lambda settings, figures: []), Settings(tmp_path))
    assert shown == [None, "slow: only", "slow: only, half"]


def test_changed_settings_are_computed_again(tmp_path):
    Squares().go(tmp_path)
    changed = Squares(scale=10)
    report, _ = changed.go(tmp_path, resume=True)
    assert changed.computed == [1, 2, 3]
    assert report.read_text() == "10 40 90"


def test_cells_of_another_version_are_computed_again(tmp_path, monkeypatch):
    Squares().go(tmp_path)
    monkeypatch.setattr(bethenet, "__version__", "another")
    again = Squares()
    again.go(tmp_path, resume=True)
    assert again.computed == [1, 2, 3]


def test_settings_that_json_changes_are_recognised(tmp_path):
    """A tuple is read back as a list."""

    def cells(settings):
        return [Cell("only", {"sizes": (1, 2)}, lambda: {"times": next(times)})]

    times = iter(range(5))
    described = Experiment("tuples", "Tuples", cells, lambda settings, figures: [])
    run_experiment(described, Settings(tmp_path))
    (record,) = run_experiment(described, Settings(tmp_path, resume=True))
    assert json.loads(record.read_text())["cells"]["only"]["times"] == 0


def test_a_truncated_cell_is_computed_again(tmp_path):
    Squares().go(tmp_path)
    path = tmp_path / "cells" / "squares" / "square-2.json"
    path.write_text(path.read_text()[:20])
    again = Squares()
    again.go(tmp_path, resume=True)
    assert again.computed == [2]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["file.json"]


def test_non_finite_numbers_become_null(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": [1.5, math.nan, (math.inf, -math.inf)], 3: {"b": math.nan}, "c": "nan", "d": True})
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content == {"a": [1.5, None, [None, None]], "3": {"b": None}, "c": "nan", "d": True}


def test_markdown_aligns_names_left_and_figures_right():
    assert markdown_table(["", "n = 5"], [["Exact", "1.0"], ["BP", "2.0"]]) == (
        "|  | n = 5 |\n|:--|--:|\n| Exact | 1.0 |\n| BP | 2.0 |\n"
    )


def test_mean_and_standard_error():
    mean, error = mean_and_error([1.0, None, 3.0, 5.0])
    assert mean == pytest.approx(3.0)
    assert error == pytest.approx(2 / math.sqrt(3))
    assert mean_and_error([4.0]) == (4.0, 0.0)
    assert all(math.isnan(value) for value in mean_and_error([None]))


def test_environment_is_plain_json():
    found = environment("cpu")
    assert json.loads(json.dumps(found)) == found
    assert found["bethenet"] == bethenet.__version__


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_name_in_the_catalogue_is_an_experiment_with_distinct_cells(name, tmp_path):
    found = experiment(name)
    assert found.name == name
    made = found.cells(Settings(tmp_path, quick=True))
    keys = [cell.key for cell in made]
    assert keys
    assert len(set(keys)) == len(keys)
    assert all("/" not in key for key in keys)
    json.dumps([dict(cell.settings) for cell in made])


def test_an_unknown_experiment_is_refused():
    with pytest.raises(ValueError, match=r"expected an experiment out of table1, .*; got 'table9'"):
        experiment("table9")
