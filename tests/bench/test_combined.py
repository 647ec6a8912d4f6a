"""The four cells of the combined measurement, on a tiny model."""

import json

import pytest

from jaxtrl.bench import combined
from jaxtrl.rows.sources import load_source


def test_as_many_samples_as_fill_the_rows(tmp_path, model, data):
    count, epochs = combined.choose_samples(model, data, 3, 256, str(tmp_path))
    assert 3 < count < 30
    assert epochs == 1
    written = load_source(str(tmp_path / combined.SAMPLES))
    assert len(written) == count
    row = written[0]
    assert len(row["labels"]) == len(row["input_ids"])
    assert -100 in row["labels"], "the prompt is not trained"
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    count, epochs = combined.choose_samples(model, data, 1000, 256, str(tmp_path))
    assert count == 30
    assert epochs > 1


@pytest.mark.slow
def test_each_cell_is_measured_in_a_process_of_its_own(model, data, capsys, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of the test suite: eight devices would share three rows
    argv = ["--model", model, "--data", data, "--steps", "3", "--max_length", "256", "--json"]
    assert combined.main(argv) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    (result,) = last["data"].values()
    cells = result["cells"]
    assert list(cells) == list(combined.CELLS)
    assert len({cell["tokens"] for cell in cells.values()}) == 1, "all train the same samples"
    for name, cell in cells.items():
        assert cell["seconds"] > cell["compile_seconds"] > 0
        assert (cell["packing_ratio"] > 2) == name.startswith("tree")
    assert cells["packed, shape set"]["programs"] == 1
    assert cells["packed, exact shapes"]["programs"] > 1
    assert cells["tree, shape set"]["steps"] < cells["packed, shape set"]["steps"] == 3
