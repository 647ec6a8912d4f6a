import json

import numpy as np
import pytest

from jaxtrl.bench import tree
from jaxtrl.bench.__main__ import main as bench

TINY = "--hidden 16 --layers 1 --heads 2 --kv_heads 1 --head_dim 8 --mlp 16 --vocab 32 --length 64 --repeats 1 --json"


def test_same_loss_and_counted_numbers(capsys):
    assert tree.main([*TINY.split(), "--generations", "3", "--prompt-fraction", "0.75", "--block_size", "16"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["raw_tokens"], result["unique_tokens"]) == (3 * 64, 48 + 3 * 16)
    assert result["packed_loss"] == pytest.approx(result["tree_loss"], rel=1e-5)
    # Blocks of 16: each packed document visits 4 * 5 / 2; the prompt 3 * 4 / 2, each completion the prompt and itself.
    assert (result["packed_visited_blocks"], result["packed_needed_blocks"]) == (30, 30)
    assert (result["visited_blocks"], result["needed_blocks"]) == (6 + 3 * 4, 6 + 3 * 4)
    # Linear layers 768 + 768 weights, four passes; attention 4 * 16 a pair, 4.5 passes; head three passes of 48 slots.
    linear, head = 2 * (16 * (2 * 16 + 2 * 8) + 3 * 16 * 16) * 4, 2 * 32 * 16 * 3 * 48
    pairs = 3 * 64 * 65 // 2, 48 * 49 // 2 + 3 * (16 * 48 + 16 * 17 // 2)
    packed, shared = (linear * n + 64 * 4.5 * p + head for n, p in zip((192, 96), pairs, strict=True))
    assert result["limit"] == pytest.approx(packed / shared, rel=1e-6)
    assert result["speedup"] == pytest.approx(np.median(result["speedups"]))
    assert {"packed_seconds", "tree_seconds", "memory_ratio", "ratio"} <= result.keys()


@pytest.mark.parametrize(("tokens", "size"), [(1216, 304), (4096, 256), (128, 128), (100, 128), (640, 320)])
def test_block_size_that_fits(tokens, size):
    assert tree.fit_block_size(tokens) == size


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prompt-fraction 1.0", "at least one token"),
        ("--generations 33", "no more completions"),
        ("--length 1", "at least one token"),
    ],
)
def test_samples_that_cannot_be(flags, words, capsys):
    assert tree.main([*TINY.split(), *flags.split()]) == 1
    assert words in capsys.readouterr().out


def test_turns_of_a_file(shared_data, tmp_path, capsys):
    """Real turns: grouped by trajectory, and the same loss on both sides."""
    from jaxtrl.model.config import Qwen3Config
    from jaxtrl.model.hf import save_pretrained
    from jaxtrl.model.qwen3 import init_params

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    save_pretrained((config, init_params(config, 0)), tmp_path, source=shared_data / "qwen3-tokenizer")
    data = shared_data / "jsonl" / "agent_turns_sample.jsonl"
    samples = tree.read_data(str(data), str(tmp_path), 12)
    assert len(samples) == 12
    assert len({sample.group for sample in samples}) == 2
    assert tree.main(["--data", str(data), "--model", str(tmp_path), "--rows", "2", "--repeats", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["raw_tokens"] > 1.9 * result["unique_tokens"]
    assert result["packed_loss"] == pytest.approx(result["tree_loss"], rel=1e-5)


def test_data_needs_a_model(capsys):
    with pytest.raises(SystemExit):
        tree.main(["--data", "x.jsonl"])
    assert "--model" in capsys.readouterr().err


def test_names_are_listed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "nothing"])
    assert bench() == 2
    assert "tree" in capsys.readouterr().err
