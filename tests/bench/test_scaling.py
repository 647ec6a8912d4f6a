"""`bench scaling` on a tiny model: both jobs take steps and are timed."""

import json
import os

import pytest

from jaxtrl.bench import scaling

TINY = "--hidden 16 --layers 1 --heads 2 --kv_heads 1 --head_dim 8 --mlp 16 --vocab 32 --tokens 64 --repeats 2 --json"


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores")
def test_both_jobs_are_timed(capsys):
    assert scaling.main(TINY.split()) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["seconds_one"]) == len(result["seconds_two"]) == 2
    assert result["ratio"] > 0
    assert result["tokens_per_second_one"] > 0
    assert 3 < result["loss_two"] < 4, "about log(32)"


def test_one_core_is_not_enough(capsys, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert scaling.main([]) == 2
    assert "needs two CPU cores" in capsys.readouterr().err
