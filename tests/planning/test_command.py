"""`python -m jaxtrl.plan`: what it writes, rollouts, the plot, and wrong input as one sentence."""

import json
import sys

import pytest

from jaxtrl import plan
from jaxtrl.assets import tokenizer_path
from jaxtrl.planning.rollouts import read_rollouts
from tests.test_sft import CHAT

QUICK = ["--seconds_per_compile=2", "--matmul_tflops=0.1"]


@pytest.fixture
def model(tmp_path):
    """A model folder without weights: a plan needs the config and the tokenizer only."""
    from transformers import AutoTokenizer

    from jaxtrl.trainers.model_source import tiny_model

    folder = tmp_path / "model"
    AutoTokenizer.from_pretrained(tokenizer_path()).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(tiny_model(0)[0].config.to_dict()))
    return folder


def run(tmp_path, model, *argv):
    code = plan.main([f"--output_dir={tmp_path / 'out'}", f"--model_name_or_path={model}", *QUICK, *map(str, argv)])
    path = tmp_path / "out" / "plan.json"
    return code, json.loads(path.read_text()) if path.exists() else None


def sentence(capsys, *argv):
    try:
        code = plan.main([*map(str, argv)])
    except SystemExit as error:
        code = error.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("python -m jaxtrl.plan: error: ")
    return code, lines[0]


def test_a_plan_is_shown_and_written(tmp_path, model, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text(CHAT * 12)
    code, planned = run(tmp_path, model, f"--dataset_name={data}", "--num_train_epochs=2")
    assert code == 0
    assert planned["data"]["rows"] == 12
    text = capsys.readouterr().out
    for word in ("1. shape cost", "break-even", "recommended:", "2. sharing", "memory of a device"):
        assert word in text
    assert planned["sharing"]["unique_tokens"] < planned["sharing"]["raw_tokens"], "equal chats share"


def test_the_default_is_that_of_sft(tmp_path, capsys):
    assert plan.main([f"--output_dir={tmp_path}", *QUICK, "--max_steps=30"]) == 0
    planned = json.loads((tmp_path / "plan.json").read_text())
    assert planned["run"]["programs"] == {"train": 1, "eval": 1}
    assert planned["run"]["steps"] == 30


def test_rollouts(tmp_path, model):
    path = tmp_path / "rollouts.jsonl"
    prompts = [[7, 8, 9] * 10, [4, 5] * 20]
    lines = [
        {"prompt_ids": p, "completion_ids": [10 + i, 11, 12], "group": g}
        for g, p in enumerate(prompts)
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, planned = run(tmp_path, model, f"--rollouts={path}", "--num_train_epochs=1")
    assert code == 0
    by_group = planned["sharing"]["ratio_by"]["group"]
    assert by_group["count"] == 2
    assert by_group["raw_tokens"] == 4 * (33 + 43)
    assert by_group["unique_tokens"] == 30 + 40 + 8 * 3
    assert planned["sharing"]["unique_tokens"] == by_group["unique_tokens"], "groups always share"
    assert planned["data"]["trained_tokens"] == 8 * 3


def test_groups_of_rollouts_without_a_group_are_equal_prompts(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"prompt_ids": [1, 2], "completion_ids": [3]}\n\n{"prompt_ids": [1], "completion_ids": [2, 3]}\n')
    first, second = read_rollouts(str(path))
    assert first["input_ids"] == second["input_ids"] == [1, 2, 3]
    assert first["labels"] == [-100, -100, 3]
    assert first["group"] != second["group"]
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 2)
    first, second = read_rollouts(str(path))
    assert first["group"] == second["group"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file"),
        ("\n", "is empty"),
        ("{\n", "line 1: not valid JSON"),
        ("[1]\n", "line 1: expected a JSON object"),
        ('{"prompt_ids": [1], "completion_ids": [1.5]}\n', "line 1: completion_ids must be a list of token ids"),
        ('{"text": "x"}\n', "line 1: prompt_ids must be a list"),
        ('{"messages": []}\n', "line 1: messages must be a list of messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"prompt_ids": [1], "completion_ids": [2]}\n', "one kind"),
    ],
)
def test_wrong_rollouts(tmp_path, capsys, content, expected):
    path = tmp_path / "rollouts.jsonl"
    if content is not None:
        path.write_text(content)
    code, text = sentence(capsys, f"--output_dir={tmp_path / 'out'}", f"--rollouts={path}")
    assert code == 1
    assert expected in text


def test_wrong_input_is_one_sentence(tmp_path, model, capsys, monkeypatch):
    data = tmp_path / "rows.jsonl"
    data.write_text(CHAT * 3)
    base = [f"--output_dir={tmp_path / 'out'}", f"--model_name_or_path={model}", f"--dataset_name={data}", *QUICK]
    assert sentence(capsys, *base, "--plott=x.png")[0] == 2
    assert "expected more than 0" in sentence(capsys, *base, "--matmul_tflops=0")[1]
    assert "no column 'trajectory'" in sentence(capsys, *base, "--group_column=trajectory")[1]
    streaming = sentence(capsys, *base, "--dataset_streaming", "--max_steps=3")
    assert streaming[0] == 1
    assert "a plan needs the lengths of all rows" in streaming[1]
    code, text = sentence(capsys, *base, "--device_memory_gib=0.0001")
    assert code == 1
    assert "lower per_device_train_batch_size" in text
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["memory"]["fits"] is False
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'jaxtrl[report]'" in sentence(capsys, *base, "--plot=plan.png")[1]


def test_the_plot_is_drawn(tmp_path, model, capsys):
    pytest.importorskip("matplotlib")
    data = tmp_path / "rows.jsonl"
    data.write_text(CHAT * 12)
    code, _ = run(tmp_path, model, f"--dataset_name={data}", f"--plot={tmp_path / 'plan.png'}")
    assert code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "must end with one of" in sentence(capsys, f"--output_dir={tmp_path}", f"--plot={tmp_path / 'plan.xyz'}")[1]
