"""The convert command: both directions, verify, one line for each error."""

import dataclasses
import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxtrl import convert
from jaxtrl.model import flax_folder
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import load_params, load_pretrained, model_params, save_pretrained
from jaxtrl.model.qwen3 import init_params
from jaxtrl.train.mesh import make_mesh
from jaxtrl.trainers.model_source import tiny_model
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_trainer import SFTTrainer
from tests import fixture_t

CONFIG = Qwen3Config.from_dict(fixture_t.CONFIG)


@pytest.fixture
def hf(tmp_path):
    """Fixture T as bfloat16 shards with a tokenizer file."""
    folder = tmp_path / "hf"
    save_pretrained((CONFIG, init_params(CONFIG, 0)), folder, dtype=jnp.bfloat16, max_shard_size="10KB")
    (folder / "tokenizer.json").write_text("tokens")
    (folder / "generation_config.json").write_text("generation")
    return folder


@pytest.fixture
def flax(hf, tmp_path):
    """The same as an Orbax checkpoint."""
    convert.to_flax(hf, tmp_path / "as_flax")
    return tmp_path / "as_flax"


def run(capsys, *argv) -> tuple[int, str, str]:
    code = convert.main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_to_flax_and_back_is_bitwise_and_keeps_the_files(hf, tmp_path, capsys):
    flax, back = tmp_path / "flax", tmp_path / "back"
    assert run(capsys, "to-flax", hf, flax)[:2] == (0, f"wrote {flax}\n")
    assert flax_folder.is_flax_folder(flax)
    assert run(capsys, "to-hf", flax, back, "--max_shard_size", "10KB")[0] == 0
    names = sorted(path.name for path in hf.iterdir())
    assert names == sorted(path.name for path in back.iterdir())
    for name in names:
        assert (hf / name).read_bytes() == (back / name).read_bytes()
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        assert (hf / name).read_bytes() == (flax / name).read_bytes()
    code, out, _ = run(capsys, "verify", hf, flax, "--no_logits")
    assert (code, out) == (0, "24 tensors: 24 identical in every byte, 0 differences\n")


def test_load_pretrained_reads_a_flax_folder(hf, tmp_path):
    convert.to_flax(hf, tmp_path / "flax")
    a, b = (model_params(load_pretrained(folder)) for folder in (hf, tmp_path / "flax"))
    assert a["norm"]["scale"].dtype == b["norm"]["scale"].dtype == jnp.float32
    np.testing.assert_array_equal(a["layers"]["mlp"]["up_proj"]["kernel"], b["layers"]["mlp"]["up_proj"]["kernel"])


@pytest.mark.parametrize("command", ["to-flax", "to-hf"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_casts(hf, flax, tmp_path, capsys, command, dtype):
    source = hf if command == "to-flax" else flax
    assert run(capsys, command, source, tmp_path / "out", "--dtype", dtype)[0] == 0
    config, params = load_params(tmp_path / "out")
    assert config == CONFIG
    assert params["norm"]["scale"].dtype == np.dtype(convert.DTYPES[dtype])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    # every bfloat16 value of these weights is also a float32 and (being of ordinary size) a float16
    code, out, _ = run(capsys, "verify", hf, tmp_path / "out", "--no_logits", "--tolerance", "1e-7")
    assert code == 0, out


def test_verify_names_what_differs(hf, tmp_path, capsys):
    other = tmp_path / "other"
    config, params = load_params(hf)
    params["layers"]["mlp"]["up_proj"]["kernel"][1, 3, 4] += 0.5
    save_pretrained((dataclasses.replace(config, rms_norm_eps=1e-5), params), other)
    code, out, _ = run(capsys, "verify", hf, other, "--no_logits")
    assert code == 1
    assert out.splitlines() == [
        "24 tensors: 23 identical in every byte, 2 differences",
        f"  config.json: rms_norm_eps is 1e-06 in {hf} and 1e-05 in {other}",
        "  model.layers.1.mlp.up_proj.weight differs by up to 0.5",
    ]
    params["layers"]["mlp"]["up_proj"]["kernel"][1, 3, 4] = np.nan
    save_pretrained((config, params), other)
    code, out, _ = run(capsys, "verify", other, other, "--no_logits", "--tolerance", "100")
    assert code == 1
    assert "model.layers.1.mlp.up_proj.weight has values that are not finite" in out


def test_verify_of_other_shapes_and_names(hf, tmp_path, capsys):
    wide = dataclasses.replace(CONFIG, intermediate_size=50, tie_word_embeddings=False, num_hidden_layers=1)
    save_pretrained((wide, init_params(wide, 0)), tmp_path / "wide")
    code, out, _ = run(capsys, "verify", hf, tmp_path / "wide", "--no_logits")
    assert code == 1
    assert "model.layers.0.mlp.up_proj.weight has shape (48, 32) and (50, 32)" in out
    assert f"model.layers.1.mlp.up_proj.weight is only in {hf}" in out
    assert "  and 3 more" in out
    differences = convert.compare_tensors(hf, tmp_path / "wide").differences
    assert f"lm_head.weight is only in {tmp_path / 'wide'}" in differences
    assert len(differences) == 23


def test_a_tied_head_stored_twice_is_the_same_checkpoint(flax, tmp_path, capsys):
    once, twice = tmp_path / "once", tmp_path / "twice"
    convert.to_hf(flax, once, dtype=jnp.float32)
    shutil.copytree(once, twice)
    tensors = load_file(once / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, twice / "model.safetensors")
    code, out, _ = run(capsys, "verify", once, twice, "--no_logits")
    assert (code, out) == (0, "24 tensors: 24 identical in every byte, 0 differences\n")


def test_errors_are_one_line(hf, flax, tmp_path, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("")
    broken = tmp_path / "broken"
    shutil.copytree(hf, broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    for argv, message in (
        (("to-flax", tmp_path / "absent", tmp_path / "out"), "absent is not a folder"),
        (("to-flax", hf, full), "full exists and is not an empty folder: give a new one"),
        (("to-hf", hf, full / "x"), "x exists and is not an empty folder"),
        (("to-hf", hf, hf), "exists and is not an empty folder"),
        (("to-hf", hf, tmp_path / "out"), "hf is in Hugging Face's format already: to-hf takes an Orbax checkpoint"),
        (("to-hf", hf, tmp_path / "out", "--dtype", "float32"), "use to-flax first to cast"),
        (("to-flax", flax, tmp_path / "out"), "as_flax is an Orbax checkpoint already"),
        (("to-flax", broken, tmp_path / "out"), f"{shard.name} is truncated"),
        (("verify", hf, broken), f"{shard.name} is truncated"),
        (("to-hf", flax, tmp_path / "out", "--max_shard_size", "much"), "max_shard_size must be a positive number"),
    ):
        code, out, error = run(capsys, *argv)
        assert (code, out) == (1, "")
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_training_checkpoint_converts_to_what_the_run_ends_with(tmp_path, capsys):
    """Weights, tokenizer and generation config: the folder of the last checkpoint becomes that of the final model."""
    model, tokenizer = tiny_model(0)
    source, out = tmp_path / "source", tmp_path / "out"
    save_pretrained(model, source)
    tokenizer.save_pretrained(source)
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    options = {"max_steps": 1, "save_steps": 1, "compile_cache": "off", "pad_to_multiple_of": "fixed:128"}
    rows = [{"input_ids": [5, 6, 7]}] * 8
    SFTTrainer(source, SFTConfig(output_dir=str(out), **options), train_dataset=rows, mesh=make_mesh(1)).train()
    assert run(capsys, "to-hf", out / "checkpoint-1", tmp_path / "hf")[0] == 0
    final = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    converted = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert set(final) - set(converted) == {"metrics.jsonl", "run.json"}
    assert converted["generation_config.json"] == b'{"temperature": 0.6}'
    assert all(content == final[name] for name, content in converted.items())


@pytest.mark.parametrize(
    "argv",
    [
        ["to-mars", "a", "b"],
        ["to-hf", "a"],
        ["to-hf", "a", "b", "--dtyp", "float32"],
        ["to-hf", "a", "b", "--dtype", "int8"],
        ["verify", "a", "b", "--tolerance", "small"],
        ["verify", "a", "b", "--tolerance", "nan"],
        ["verify", "a", "b", "--tolerance", "-1"],
    ],
)
def test_usage_errors_exit_with_two(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        convert.main(argv)
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_damaged_flax_folder_is_one_clear_error(hf, tmp_path, capsys):
    flax = tmp_path / "flax"
    convert.to_flax(hf, flax)
    config = json.loads((flax / "config.json").read_text())
    (flax / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(
        ValueError, match=r"flax: layers.input_layernorm.scale has shape \(2, 32\), config makes it \(3"
    ):
        load_params(flax)
    (flax / "config.json").write_text(json.dumps(config))
    data = max((path for path in flax.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    for damage, message in (
        (lambda: data.write_bytes(data.read_bytes()[:1000]), r"model: [a-z_.]+ cannot be read \("),
        (data.unlink, r"model: [a-z_.]+ cannot be read \("),
        ((flax / "params" / "_METADATA").unlink, r"model: its metadata cannot be read \("),
    ):
        damage()
        code, _, error = run(capsys, "verify", hf, flax, "--no_logits")
        assert code == 1
        assert error.count("\n") == 1
        assert re.search(f"params is no complete Orbax checkpoint of a {message}", error)


def test_no_arguments_round_trips_a_tiny_model(capsys, monkeypatch):
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    code, out, _ = run(capsys)
    assert code == 0
    assert out.count("24 tensors: 24 identical in every byte, 0 differences") == 2
    assert out.count("logits: not compared with Transformers, torch is not installed") == 2


@pytest.mark.torch
def test_verify_compares_logits_with_transformers(hf, tmp_path, capsys):
    pytest.importorskip("torch")
    flax = tmp_path / "flax"
    convert.to_flax(hf, flax)
    for pair in ((hf, flax), (flax, hf)):
        code, out, _ = run(capsys, "verify", *pair)
        assert code == 0
        assert "logits: jaxtrl and Transformers differ by up to" in out
    code, out, _ = run(capsys, "verify", flax, flax)
    assert code == 0
    assert "logits: not compared with Transformers, neither checkpoint is in Hugging Face's format" in out
    other = tmp_path / "other"
    save_pretrained((CONFIG, init_params(CONFIG, 1)), other)
    difference, largest = convert.compare_logits(flax, other)
    assert difference > convert.LOGITS_TOLERANCE * max(largest, 1.0)
    code, out, _ = run(capsys, "verify", hf, other)
    assert code == 1
