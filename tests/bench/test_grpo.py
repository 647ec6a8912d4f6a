"""`bench grpo` on a tiny model: the same loss on both sides, and FLOPs counted by hand."""

import json

import pytest

from jaxtrl.bench import grpo

TINY = "--hidden 16 --layers 1 --heads 2 --kv_heads 1 --head_dim 8 --mlp 16 --vocab 32 --repeats 1 --json"
GROUP = "--group 3 --prompt 48 --completion 16 --block_size 16"


def test_same_loss_and_counted_numbers(capsys):
    assert grpo.main([*TINY.split(), *GROUP.split()]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["raw_tokens"], result["unique_tokens"]) == (3 * 64, 48 + 3 * 16)
    assert result["packed_loss"] == pytest.approx(result["tree_loss"], rel=1e-4)
    assert result["packed_loss"] != 0
    # Linear layers 768 + 768 weights, four passes; attention 4 * 16 a pair, 4.5 passes; head three passes of 48 slots.
    linear, head = 2 * (16 * (2 * 16 + 2 * 8) + 3 * 16 * 16) * 4, 2 * 32 * 16 * 3 * 48
    pairs = 3 * 64 * 65 // 2, 48 * 49 // 2 + 3 * (16 * 48 + 16 * 17 // 2)
    packed, shared = (linear * n + 64 * 4.5 * p + head for n, p in zip((192, 96), pairs, strict=True))
    assert result["limit"] == pytest.approx(packed / shared, rel=1e-6)
    assert {"packed_seconds", "tree_seconds", "step_speedup", "update_seconds", "fraction_of_limit"} <= result.keys()


def test_a_group_that_cannot_be(capsys):
    assert grpo.main([*TINY.split(), "--group", "33"]) == 1
    assert "no more completions" in capsys.readouterr().out
