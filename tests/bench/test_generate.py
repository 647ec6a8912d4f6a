"""`bench generate` on a tiny model: it runs, its last line is one object with the promised keys."""

import json

import pytest

from jaxtrl import save_pretrained
from jaxtrl.bench.generate import main
from tests.rollout.models import fixture_t

SMALL = ["--batch", "2", "--prompt", "9", "--new", "6", "--tokens_per_call", "4", "--repeats", "1", "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_pretrained(fixture_t(), path)
    return str(path)


def test_last_line_is_one_object(folder, capsys):
    assert main(["--model", folder, *SMALL, "--compare_bfloat16"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    promised = ["tokens_per_second", "prefill_seconds", "decode_bytes_per_second", "copy_bytes_per_second", "programs"]
    assert all(result[name] > 0 for name in [*promised, "prefill_seconds_of_one", "filtered_ratio"])
    assert result["programs"] == 4  # weights, prefill, insert, decode
    assert result["fraction_of_copy"] == result["decode_bytes_per_second"] / result["copy_bytes_per_second"]
    assert 0 < result["bfloat16_logp_difference_mean"] < result["bfloat16_logp_difference_max"] < 0.1


def test_many_requests_are_each_answered_once(folder, capsys):
    assert main(["--model", folder, *SMALL, "--requests", "40"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["answered_once"], result["wrong_length"], result["programs_after_warm_up"]) == (40, 0, 0)
    assert 0 < result["rss_gib_at_a_tenth"] <= result["rss_gib_at_the_end"] + 0.1


def test_a_size_of_zero_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--model", "nowhere", "--batch", "0"])
    assert error.value.code == 2
    assert "--batch is 0: it must be at least 1" in capsys.readouterr().err
