"""A tiny model on disk and rows for it."""

import json

import pytest

from jaxtrl.assets import tokenizer_path


@pytest.fixture
def model(tmp_path):
    from transformers import AutoTokenizer

    from jaxtrl.model.hf import save_pretrained
    from jaxtrl.trainers.model_source import tiny_model

    save_pretrained(tiny_model(0)[0], tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer_path()).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def data(tmp_path):
    prompt = "one two three four five six seven eight " * 4
    rows = [{"prompt": prompt, "completion": f" number {i}" * (1 + 5 * i % 13)} for i in range(30)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
