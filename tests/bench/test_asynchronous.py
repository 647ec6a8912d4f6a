"""`bench async`: both cells train the same groups within the staleness bound, and what is counted of them."""

import json
import os

import pytest

from jaxtrl.bench import asynchronous


def test_the_reward_is_the_share_of_even_ids():
    assert asynchronous.even_ids([[1, 2, 3, 4], [1], [2]]) == [0.5, 0.0, 1.0]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two CPU cores are needed")
def test_both_cells_sample_as_much_as_they_train(capsys, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of the test suite: eight devices
    argv = [
        "--steps",
        "3",
        "--batch",
        "8",
        "--group",
        "4",
        "--completion",
        "8",
        "--slots",
        "8",
        "--pairs",
        "1",
        "--json",
    ]
    assert asynchronous.main(argv) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    (pair,) = last["pairs"]
    assert list(pair["cells"]) == ["inline", "workers"]
    for cell in pair["cells"].values():
        assert cell["seconds"] > 0
        assert 0 <= cell["wait_seconds"] <= cell["seconds"]
        assert cell["staleness"] <= asynchronous.MAX_STALENESS
    inline = pair["cells"]["inline"]
    assert 3 * 8 <= inline["sampled_tokens"] <= 3 * 8 * 8
    assert last["ratio"] == pair["cells"]["workers"]["seconds"] / inline["seconds"]
