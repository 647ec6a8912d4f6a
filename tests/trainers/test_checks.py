"""Wrong files and arguments are found before a row is tokenised, each with one sentence."""

import inspect
import json
import shutil

import pytest

from jaxtrl.convert import to_flax
from jaxtrl.model.hf import save_pretrained
from jaxtrl.model.tensor_files import INDEX_FILE
from jaxtrl.trainers import sft_trainer
from jaxtrl.trainers.checks import check_files
from jaxtrl.trainers.refused import ARGUMENTS
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_trainer import SFTTrainer
from tests.trainers.conftest import tiny_qwen3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_tokenizer):
    """Fixture T's model in shards, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "model"
    save_pretrained(tiny_qwen3(), folder, max_shard_size="10KB")
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def untouched(monkeypatch):
    """Tokenising is a failure."""

    def prepare(*args, **kwargs):
        raise AssertionError("the data was tokenised")

    monkeypatch.setattr(sft_trainer, "make_batches", prepare)


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "no folder": (shutil.rmtree, FileNotFoundError, "model is not a folder"),
    "no config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, "config.json does not exist"),
    "field": (lambda f: edit_config(f, rope_scaling={"rope_type": "yarn"}), ValueError, "rope_scaling.rope_type"),
    "dtype": (lambda f: edit_config(f, dtype="int4"), ValueError, "dtype 'int4' is none of float32, bfloat16, float16"),
    "shape": (lambda f: edit_config(f, intermediate_size=50), ValueError, "mlp.* has shape .* but config.json makes"),
    "shard": (
        lambda f: sorted(f.glob("*.safetensors"))[1].unlink(),
        FileNotFoundError,
        "is missing: model.safetensors",
    ),
    "truncated": (lambda f: cut(sorted(f.glob("*.safetensors"))[1]), ValueError, "is truncated"),
    "index": (lambda f: (f / INDEX_FILE).write_text("{"), ValueError, "not valid JSON"),
    "weights": (lambda f: [p.unlink() for p in f.glob("model*")], FileNotFoundError, "has no weights"),
    "tokenizer": (lambda f: (f / "tokenizer.json").unlink(), ValueError, "has no tokenizer"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_broken_model_is_found_before_the_data_is_tokenised(make_trainer, checkpoint, tmp_path, untouched, kind):
    damage, error, message = DAMAGE[kind]
    folder = tmp_path / "some" / "model"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    with pytest.raises(error, match=message):
        make_trainer(trainer={"model": folder, "processing_class": None})


def test_an_orbax_model_of_another_shape_is_found_before_the_data_is_tokenised(
    make_trainer, checkpoint, tmp_path, untouched
):
    to_flax(checkpoint, tmp_path / "flax")
    edit_config(tmp_path / "flax", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"layers\.input_layernorm\.scale has shape"):
        make_trainer(trainer={"model": tmp_path / "flax"})
    shutil.rmtree(tmp_path / "flax" / "params")
    (tmp_path / "flax" / "params").mkdir()
    with pytest.raises(ValueError, match="no complete Orbax checkpoint"):
        make_trainer(trainer={"model": tmp_path / "flax"})


def test_a_missing_checkpoint_is_found_before_the_data_is_tokenised(make_trainer, tmp_path, untouched):
    with pytest.raises(ValueError, match=r"There is no checkpoint at .*checkpoint-7"):
        make_trainer(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        make_trainer(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))


def test_an_output_folder_that_cannot_be_written_is_found_at_once(make_trainer, untouched, monkeypatch):
    def refuse(**kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("jaxtrl.trainers.output_folder.tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"output_dir .*out cannot be written \(Permission denied\)"):
        make_trainer()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_trl_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=f"not supported by jaxtrl: {name} "):
        SFTTrainer("model", **{name: None})
    assert name not in inspect.signature(SFTTrainer).parameters


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokenizer": None}, ValueError, r"tokenizer \(it is called processing_class\)"),
        ({"peft_config": None}, ValueError, "no adapters"),
        ({"max_length": 8}, ValueError, r"max_length \(it is an option: pass args=SFTConfig\(max_length=...\)\)"),
        ({"max_seq_length": 8}, ValueError, r"max_seq_length \(TRL renamed it: use max_length\)"),
        ({"train_datasets": []}, TypeError, "unknown argument 'train_datasets'; did you mean 'train_dataset'"),
        ({"unsupported": 1}, TypeError, "unknown argument 'unsupported'"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, error, message):
    with pytest.raises(error, match=message):
        SFTTrainer("model", **arguments)


@pytest.mark.torch
def test_every_argument_of_trl_and_transformers_is_taken_or_refused():
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    known = {*inspect.signature(SFTTrainer).parameters, *ARGUMENTS}
    for theirs in (trl.SFTTrainer, transformers.Trainer):
        assert set(inspect.signature(theirs.__init__).parameters) - {"self"} <= known


def test_the_config_must_be_ours():
    with pytest.raises(TypeError, match=r"args must be a jaxtrl\.SFTConfig, not a builtins\.dict"):
        check_files(tiny_qwen3(), {"max_length": 8}, SFTConfig)
