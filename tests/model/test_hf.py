"""Hugging Face checkpoints in and out: tied and missing heads, bitwise round trips, one clear error for each fault."""

import dataclasses
import json
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.numpy import load_file, save_file

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import (
    CARRIED_FILES,
    hf_layout,
    load_params,
    load_pretrained,
    params_from_hf,
    params_to_hf,
    resolve_model,
    save_pretrained,
)
from jaxtrl.model.qwen3 import init_params, model_graphdef, model_params
from jaxtrl.model.tensor_files import open_tensors
from jaxtrl.rows.blocks import block_tables
from jaxtrl.train.mesh import make_mesh, param_shardings
from tests import fixture_t

CONFIG = Qwen3Config.from_dict(fixture_t.CONFIG)
UNTIED = dataclasses.replace(CONFIG, tie_word_embeddings=False)
BIASED = dataclasses.replace(UNTIED, attention_bias=True, num_hidden_layers=3)
BF16 = np.dtype(ml_dtypes.bfloat16)


def write_fixture(folder, tensors, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**fixture_t.CONFIG, **fields}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def nll_sum(model) -> float:
    ids, until = np.array(fixture_t.R2, np.int32), np.full(8, 8, np.int32)
    hidden = model(ids, np.arange(8, dtype=np.int32), until, block_tables(until, 8))
    scores = jax.nn.log_softmax(hidden @ model.head_weight().T)
    return -float(np.asarray(scores)[np.arange(7), ids[1:]].sum())


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_c19_a_tied_head_is_found_wherever_it_is_stored(tmp_path, stored):
    tensors = fixture_t.tensors()
    if stored != "embedding":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    if stored == "head":
        del tensors["model.embed_tokens.weight"]
    model = load_pretrained(write_fixture(tmp_path, tensors))
    assert abs(nll_sum(model) - 38.241784) < 2e-5
    assert model.lm_head is None


def test_c19_an_untied_head_is_its_own(tmp_path):
    model = load_pretrained(write_fixture(tmp_path, fixture_t.tensors(tie=False), tie_word_embeddings=False))
    assert abs(nll_sum(model) - 32.045619) < 2e-5


def test_c19_heads_that_are_missing_or_contradict_are_errors(tmp_path):
    folder = write_fixture(tmp_path, fixture_t.tensors(), tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"tensor lm_head.weight of shape \(64, 32\) is missing; its head is not tied"):
        load_pretrained(folder)
    write_fixture(folder, fixture_t.tensors(tie=False))
    with pytest.raises(
        ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings"
    ):
        load_pretrained(folder)
    only_head = fixture_t.tensors(tie=False)
    del only_head["model.embed_tokens.weight"]
    write_fixture(folder, only_head, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"tensor model.embed_tokens.weight of shape .* is missing"):
        load_pretrained(folder)


def test_c19_tied_stays_tied_and_untied_untied(tmp_path):
    for config in (CONFIG, UNTIED):
        folder = tmp_path / str(config.tie_word_embeddings)
        save_pretrained((config, init_params(config, 0)), folder)
        names = load_file(folder / "model.safetensors").keys()
        assert ("lm_head.weight" in names) is not config.tie_word_embeddings
        assert len(names) == 24 + (not config.tie_word_embeddings)
        assert Qwen3Config.from_pretrained(folder) == config


def test_c18_shapes_come_from_head_dim():
    shapes = {entry.name: entry.shape for entry in hf_layout(CONFIG)}
    assert shapes == {name: x.shape for name, x in fixture_t.tensors().items()}
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (64, 32)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (32, 64)


@pytest.mark.parametrize("config", [CONFIG, UNTIED, BIASED])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, np.dtype(np.float16)])
@pytest.mark.parametrize("shard", ["50GB", "10KB"])
def test_the_round_trip_is_bitwise_in_every_stored_dtype(tmp_path, config, dtype, shard):
    params = jax.tree.map(lambda x: (x + 0.1).astype(dtype), init_params(config, 1))
    save_pretrained((config, params), tmp_path / "a", max_shard_size=shard)
    loaded = load_params(tmp_path / "a")
    assert loaded[0] == config
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8)), loaded[1], params)
    save_pretrained(loaded, tmp_path / "b", max_shard_size=shard)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert len(files) == 2 if shard == "50GB" else len(files) > 4
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("config", [CONFIG, BIASED])
def test_parameters_are_read_as_they_are_cut(tmp_path, config):
    """Each device's part alone, from files and back: the same bytes as from one copy on the host."""
    save_pretrained((config, init_params(config, 1)), tmp_path / "a", max_shard_size="10KB")
    whole, shardings = load_params(tmp_path / "a")[1], param_shardings(init_params(config, 1), make_mesh(2, 2, 2))
    cut = load_params(tmp_path / "a", shardings=shardings)[1]
    jax.tree.map(np.testing.assert_array_equal, cut, whole)
    assert jax.tree.map(lambda x: x.sharding, cut) == shardings
    assert {shard.data.shape for shard in cut["embed_tokens"].addressable_shards} == {(32, 16)}
    save_pretrained((config, cut), tmp_path / "b", max_shard_size="10KB")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_kernels_are_in_out_and_stacked():
    tensors = fixture_t.tensors()
    params = params_from_hf(CONFIG, tensors)
    for layer in range(2):
        kernel = tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
        np.testing.assert_array_equal(params["layers"]["mlp"]["down_proj"]["kernel"][layer], kernel.T)
        scale = tensors[f"model.layers.{layer}.self_attn.q_norm.weight"]
        np.testing.assert_array_equal(params["layers"]["self_attn"]["q_norm"]["scale"][layer], scale)
    back = dict(params_to_hf(CONFIG, params))
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(back[name], x)


def test_dtypes_are_cast_on_request(tmp_path):
    params = params_from_hf(CONFIG, fixture_t.tensors())
    save_pretrained((CONFIG, params), tmp_path, dtype=jnp.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {x.dtype for x in open_tensors(tmp_path).values()} == {BF16}
    model = load_pretrained(tmp_path)
    assert {x.dtype for x in jax.tree.leaves(model_params(model))} == {np.dtype(np.float32)}
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), y.astype(BF16).astype(np.float32)),
        model_params(model),
        params,
    )
    assert {x.dtype for x in jax.tree.leaves(model_params(load_pretrained(tmp_path, dtype=jnp.bfloat16)))} == {BF16}
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, but it is float16"):
        load_pretrained(tmp_path, dtype=jnp.float16)


def test_float16_that_overflows_is_refused_and_non_finite_values_are_kept():
    params = init_params(CONFIG, 0)
    params["norm"]["scale"][3] = 7e4
    with pytest.raises(ValueError, match=r"tensor model.norm.weight has values beyond float16's 65504"):
        list(params_to_hf(CONFIG, params, dtype=np.float16))
    with pytest.raises(ValueError, match=r"tensor model.norm.weight has values beyond float16's 65504"):
        params_from_hf(CONFIG, dict(params_to_hf(CONFIG, params)), dtype=np.float16)
    params["norm"]["scale"][3] = np.inf
    assert np.isinf(dict(params_to_hf(CONFIG, params, dtype=np.float16))["model.norm.weight"][3])


def test_mixed_stored_dtypes(tmp_path):
    tensors = fixture_t.tensors()
    half = "model.layers.1.mlp.up_proj.weight"
    tensors[half] = tensors[half].astype(np.float16)
    folder = write_fixture(tmp_path, tensors)
    with pytest.raises(ValueError, match=f"tensor {half} is float16, other layers are float32: give a dtype"):
        load_params(folder)
    assert load_params(folder, dtype=np.float32)[1]["layers"]["mlp"]["up_proj"]["kernel"].dtype == np.float32
    norms = {name: x.astype(BF16) if x.ndim == 2 else x for name, x in fixture_t.tensors().items()}
    params = params_from_hf(CONFIG, norms)  # bfloat16 matrices with float32 norms are kept as they are
    assert params["norm"]["scale"].dtype == np.float32
    save_pretrained((CONFIG, params), tmp_path / "out")
    assert {name: x.dtype for name, x in open_tensors(tmp_path / "out").items()} == {
        n: x.dtype for n, x in norms.items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"tensor model.layers.1.mlp.up_proj.weight of .* is missing",
        ),
        (lambda t: t.pop("model.norm.weight"), r"tensor model.norm.weight of shape \(32,\) is missing"),
        (lambda t: t.update(note=t["model.norm.weight"]), "tensor note is extra"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"]}),
            "tensor model.layers.2.mlp.up_proj.weight is extra",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"]}),
            "tensor model.layers.0.self_attn.q_proj.bias is extra",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:-1].copy()}),
            r"tensor model.norm.weight has shape \(31,\), but config.json makes it \(32,\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": np.zeros((32, 64), np.float32)}),
            r"tensor model.layers.0.self_attn.q_proj.weight has shape \(32, 64\), but config.json makes it \(64, 32\)",
        ),
    ],
)
def test_missing_extra_and_misshaped_tensors(tmp_path, change, message):
    tensors = fixture_t.tensors()
    change(tensors)
    with pytest.raises(ValueError, match=f"{tmp_path}: {message}"):
        load_pretrained(write_fixture(tmp_path, tensors))


def test_parameters_that_do_not_fit_the_config_are_not_saved(tmp_path):
    params = init_params(CONFIG, 0)
    with pytest.raises(ValueError, match="parameters: lm_head is missing for this config"):
        save_pretrained((UNTIED, params), tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"layers.input_layernorm.scale has shape \(2, 32\), config makes it \(3, 32\)"
    ):
        save_pretrained((dataclasses.replace(CONFIG, num_hidden_layers=3), params), tmp_path / "out")
    with pytest.raises(ValueError, match="parameters: more is extra for this config"):
        save_pretrained((CONFIG, {**params, "more": params["norm"]["scale"]}), tmp_path / "out")
    with pytest.raises(ValueError, match="cannot be saved as int32: take float32, bfloat16 or float16"):
        save_pretrained((CONFIG, params), tmp_path / "out2", dtype=np.int32)
    assert not (tmp_path / "out").exists()


def test_tokenizer_and_generation_config_are_carried_along(tmp_path):
    source = write_fixture(tmp_path / "source", fixture_t.tensors())
    for i, name in enumerate(CARRIED_FILES):
        (source / name).write_text(f"file {i}")
    (source / "README.md").write_text("not the model's")
    save_pretrained(load_pretrained(source), tmp_path / "out", source=source)
    found = {path.name: path.read_text() for path in (tmp_path / "out").iterdir() if path.name in CARRIED_FILES}
    assert found == {name: f"file {i}" for i, name in enumerate(CARRIED_FILES)}
    assert not (tmp_path / "out" / "README.md").exists()
    save_pretrained(load_pretrained(source), source, source=source)  # in place
    assert (source / "tokenizer.json").read_text() == f"file {CARRIED_FILES.index('tokenizer.json')}"


def test_names_that_are_no_checkpoint(tmp_path):
    for name in (tmp_path / "absent", "./absent", "a/b/c", "~/absent-folder-of-jaxtrl", "/absent"):
        with pytest.raises(
            FileNotFoundError, match="is not a folder: give a checkpoint folder or a Hugging Face hub id"
        ):
            resolve_model(name)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        resolve_model(file)
    with pytest.raises(
        FileNotFoundError, match=r"what is this is no folder here, and as a .* hub id it failed: that is not a valid"
    ):
        resolve_model("what is this")


def test_a_hub_id_offline(tmp_path, monkeypatch):
    """The test suite sets HF_HUB_OFFLINE: an id comes from the cache, or is one clear error."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"jaxtrl-tests/absent is no folder here, .* cache does not have it"):
        load_pretrained("jaxtrl-tests/absent")
    repository = tmp_path / "models--jaxtrl-tests--t"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    write_fixture(repository / "snapshots" / ("0" * 40), fixture_t.tensors())
    assert abs(nll_sum(load_pretrained("jaxtrl-tests/t")) - 38.241784) < 2e-5

    def incomplete(*args, **kwargs):
        raise LocalEntryNotFoundError("the snapshot has no tokenizer")

    monkeypatch.setattr("huggingface_hub.snapshot_download", incomplete)
    assert resolve_model("jaxtrl-tests/t") == repository / "snapshots" / ("0" * 40)


def test_a_hub_id_that_the_hub_does_not_have(monkeypatch):
    def answer(error):
        def download(*args, **kwargs):
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    answer(RepositoryNotFoundError("401 Client Error", response=Mock()))
    with pytest.raises(
        FileNotFoundError, match=r"Qwen/Qwen9 is no folder here, .* failed: the hub has no such model, or"
    ):
        resolve_model("Qwen/Qwen9")
    answer(OSError("disk full\nmore"))
    with pytest.raises(FileNotFoundError, match=r"Qwen/Qwen9 is no folder here, .* failed: disk full$"):
        resolve_model("Qwen/Qwen9")


@pytest.mark.torch
@pytest.mark.parametrize("config", [CONFIG, BIASED])
@pytest.mark.parametrize("shard", ["50GB", "10KB"])
def test_transformers_loads_what_is_saved_and_the_reverse(tmp_path, config, shard):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    params = jax.tree.map(lambda x: x + np.float32(0.05), init_params(config, 2))
    save_pretrained((config, params), tmp_path / "ours", max_shard_size=shard)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([fixture_t.R2])
    expected = theirs(ids).logits[0].detach().numpy()
    model = load_pretrained(tmp_path / "ours")
    until = np.full(8, 8, np.int32)
    hidden = model(ids[0].numpy().astype(np.int32), np.arange(8, dtype=np.int32), until, block_tables(until, 8))
    np.testing.assert_allclose(hidden @ model.head_weight().T, expected, atol=1e-5)

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    config_again, params_again = load_params(tmp_path / "theirs")
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


@pytest.mark.torch
@pytest.mark.parametrize("config", [CONFIG, UNTIED])
def test_c19_a_trained_model_gives_the_same_logits_in_transformers(tmp_path, config):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    params = params_from_hf(config, fixture_t.tensors(tie=config.tie_word_embeddings))
    ids, until = np.array(fixture_t.R2, np.int32), np.full(8, 8, np.int32)
    tables = block_tables(until, 8)

    def logits(params):
        model = nnx.merge(model_graphdef(config), params)
        return model(ids, np.arange(8, dtype=np.int32), until, tables) @ model.head_weight().T

    @jax.jit
    def step(params):
        gradient = jax.grad(lambda p: -jax.nn.log_softmax(logits(p))[np.arange(7), ids[1:]].mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    trained = step(params)
    save_pretrained((config, trained), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tied = theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert tied is config.tie_word_embeddings
    expected = theirs(torch.tensor([fixture_t.R2])).logits[0].detach().numpy()
    found = np.asarray(jax.jit(logits)(trained))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert np.abs(found - np.asarray(logits(params))).max() > 0.1
