"""Small SFT runs: fixture T's model on ids below 64, on one device, with the bundled tokenizer for what is textual."""

import numpy as np
import pytest
from flax import nnx

from jaxtrl.assets import tokenizer_path
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import Qwen3
from jaxtrl.train.mesh import make_mesh
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_trainer import SFTTrainer
from tests import fixture_t


@pytest.fixture(scope="session")
def tiny_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_path())


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compile_cache"))


def token_rows(lengths=(9, 5, 12, 7, 4, 10, 6, 8), seed=0):
    """Rows of ids 5..63; the first id is the row's number + 5, so that a batch tells which rows it holds."""
    rng = np.random.default_rng(seed)
    return [{"input_ids": [i + 5, *rng.integers(5, 64, n - 1).tolist()]} for i, n in enumerate(lengths)]


def tiny_qwen3(seed=0):
    return Qwen3(Qwen3Config.from_dict(fixture_t.CONFIG), rngs=nnx.Rngs(seed))


@pytest.fixture
def make_trainer(tmp_path, tiny_tokenizer, compile_cache):
    """make_trainer(option=value, ...) -> SFTTrainer; keyword arguments of the trainer go in `trainer={...}`."""

    def make(output_dir="out", trainer=None, **options):
        defaults = {
            "per_device_train_batch_size": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",  # no program of its own for each number of steps
            "logging_steps": 1,
            "save_strategy": "no",
            "pad_to_multiple_of": "fixed:128",  # one program
            "compile_cache": compile_cache,
        }
        args = SFTConfig(output_dir=str(tmp_path / output_dir), **{**defaults, **options})
        arguments = {"train_dataset": token_rows(), "processing_class": tiny_tokenizer, "mesh": make_mesh(1)}
        arguments |= trainer or {}
        return SFTTrainer(arguments.pop("model", None) or tiny_qwen3(), args, **arguments)

    return make
