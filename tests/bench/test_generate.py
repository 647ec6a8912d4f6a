"""`bench generate` on a tiny model: it runs, its last line is one object with the promised keys."""

import json

import pytest

from jaxtrl import save_pretrained
from jaxtrl.bench.generate import main
from tests.rollout.models import fixture_t


def test_last_line_is_one_object(tmp_path, capsys):
    save_pretrained(fixture_t(), tmp_path)
    flags = [
        "--batch",
        "2",
        "--prompt",
        "9",
        "--new",
        "6",
        "--tokens_per_call",
        "4",
        "--repeats",
        "1",
        "--filtered",
        "--json",
    ]
    assert main(["--model", str(tmp_path), *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    promised = ["tokens_per_second", "prefill_seconds", "decode_bytes_per_second", "copy_bytes_per_second", "programs"]
    assert all(result[name] > 0 for name in promised)
    assert result["programs"] == 4  # weights, prefill, insert, decode
    assert result["fraction_of_copy"] == result["decode_bytes_per_second"] / result["copy_bytes_per_second"]


def test_a_size_of_zero_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--model", "nowhere", "--batch", "0"])
    assert error.value.code == 2
    assert "--batch is 0: it must be at least 1" in capsys.readouterr().err
