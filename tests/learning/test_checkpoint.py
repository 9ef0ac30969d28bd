import json

import pytest
import torch
from safetensors.torch import save_file

from bethenet.learning import checkpoint
from bethenet.learning.checkpoint import CheckpointDirectory, load_checkpoint, save_checkpoint
from bethenet.learning.metrics import MetricsFile, RunningMean


def test_what_is_saved_is_loaded(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": shared, "b": shared.T, "c": torch.tensor(True), "d": torch.zeros(0, 2, dtype=torch.float64)}
    state = {"number": 0.1 + 0.2, "nothing": None, "text": "λ", "list": [{"nan": float("nan")}]}
    save_checkpoint(tmp_path / "deep" / "x.safetensors", tensors, state)
    loaded, found = load_checkpoint(tmp_path / "deep" / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert found["number"] == state["number"]
    assert found["list"][0]["nan"] != found["list"][0]["nan"]
    assert found["text"] == "λ"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_checkpoint(path, {"a": torch.zeros(1)}, {})

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(path, {"a": torch.ones(1)}, {})
    assert load_checkpoint(path)[0]["a"].item() == 0
    assert [found.name for found in tmp_path.iterdir()] == ["x.safetensors"]


def test_other_files_are_refused(tmp_path):
    (tmp_path / "broken").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "broken")
    save_file({"a": torch.zeros(1)}, tmp_path / "plain")
    with pytest.raises(ValueError, match="expected a checkpoint of format 1, got None"):
        load_checkpoint(tmp_path / "plain")


def test_the_newest_is_the_one_with_the_most_steps(tmp_path):
    directory = CheckpointDirectory(tmp_path, keep=2)
    assert directory.latest() is None
    for step in (5, 100, 20, 1_000_000_000_0):
        directory.save(step, {}, {"step": step})
    assert load_checkpoint(directory.latest())[1]["step"] == 1_000_000_000_0
    assert len(directory.files()) == 2


def test_metrics_are_cut_back_to_a_size(tmp_path):
    file = MetricsFile(tmp_path / "new" / "metrics.jsonl")
    file.append({"a": 1.5})
    size = file.size
    file.append({"a": float("inf"), "b": "text"})
    again = MetricsFile(file.path, size)
    again.append({"c": 2})
    assert [json.loads(line) for line in file.path.read_text().splitlines()] == [{"a": 1.5}, {"c": 2}]
    assert MetricsFile(file.path, 10**6).size == again.size


def test_running_means_weigh():
    means = RunningMean()
    assert means.read() == {}
    means.add({"a": torch.tensor(1.0), "b": torch.tensor(5.0)}, 3)
    means.add({"a": torch.tensor(2.0)}, 1)
    assert means.read() == {"a": 1.25, "b": 5.0}
    means.reset()
    assert means.read() == {}
