"""`bench sft` on a tiny model: what is counted, and the parts of a step."""

import json
import math
import sys

import pytest
from safetensors.numpy import load_file

from jaxtrl.bench import sft
from jaxtrl.bench.__main__ import main as bench


def test_steps_and_their_parts(model, data, capsys, monkeypatch):
    monkeypatch.setattr(sft, "matmul_rate", lambda dtype: 1e9)
    monkeypatch.setattr(sft, "copy_rate", lambda: 1e6)
    argv = ["--model", model, "--data", data, "--batch", "1", "--steps", "3", "--max_length", "256"]
    assert sft.main([*argv, "--pad_to_multiple_of", "fixed:256", "--parts", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (len(result["seconds"]), result["programs"]) == (3, 1)
    assert all(0 < tokens <= 256 for tokens in result["tokens"])
    assert result["tokens_per_second"] == pytest.approx(sum(result["tokens"][1:]) / sum(result["seconds"][1:]))
    parts = result["parts"]
    assert sum(part["seconds"] for part in parts.values()) == pytest.approx(result["seconds"][-1])
    products = parts["head"]["limit_seconds"] + parts["layers"]["limit_seconds"]
    assert products == pytest.approx(result["limit_seconds"][-1])
    weights = sum(math.prod(tensor.shape) for tensor in load_file(f"{model}/model.safetensors").values())
    assert parts["update"]["limit_seconds"] == pytest.approx(8 * 4 * weights / 1e6)
    assert parts["head"]["seconds"] > 0
    assert parts["update"]["seconds"] > 0


def test_devices_that_share_each_row_change_no_loss(model, data, capsys):
    argv = ["--model", model, "--data", data, "--batch", "1", "--steps", "2", "--max_length", "256", "--json"]
    losses = []
    for tensor in ("1", "2"):
        assert sft.main([*argv, "--pad_to_multiple_of", "fixed:256", "--tensor", tensor]) == 0
        losses.append(json.loads(capsys.readouterr().out.splitlines()[-1])["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--parts", "--tensor", "2"], "--parts measures one device: leave out --parts or --tensor"),
        (["--tensor", "0"], "mesh axis tensor is 0: give a size of at least 1"),
    ],
)
def test_wrong_input_is_one_sentence(model, data, capsys, monkeypatch, flags, sentence):
    monkeypatch.setattr(sys, "argv", ["bench", "sft", "--model", model, "--data", data, *flags])
    assert bench() == 1
    assert capsys.readouterr().err == f"python -m jaxtrl.bench sft: error: {sentence}\n"
