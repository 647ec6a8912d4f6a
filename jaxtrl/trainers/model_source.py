"""What may be given as a model and as a tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from transformers import PreTrainedTokenizerBase

from jaxtrl.assets import tokenizer_path
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import check_weights, load_params, resolve_model
from jaxtrl.model.qwen3 import Qwen3, model_params

STORED_DTYPES = ("float32", "bfloat16", "float16")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


class FoundModel(NamedTuple):
    """A model whose weights are checked but not read yet: the data comes first."""

    config: Qwen3Config
    source: Path | None  # the folder; None for an instance
    stored_dtype: str  # of the weights in the folder
    load_params: Callable[..., dict[str, Any]]  # float32; of (a pytree of shardings, or None: on the host)


def find_model(model: str | Path | Qwen3) -> FoundModel:
    """From a folder, a hub id or a `Qwen3`, whose arrays the trainer takes over.

    Raises FileNotFoundError, ValueError or TypeError for a folder whose config, index or weight headers are wrong.
    """
    if isinstance(model, Qwen3):
        return FoundModel(model.config, None, "float32", lambda shardings=None: model_params(model))
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a path, a hub id or a jaxtrl.Qwen3, not {type(model).__name__}.")
    folder = resolve_model(model)
    config = Qwen3Config.from_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if stored not in STORED_DTYPES:
        raise ValueError(f"{folder / 'config.json'}: dtype {stored!r} is none of {', '.join(STORED_DTYPES)}.")
    check_weights(folder, config)

    def load(shardings: Any = None) -> dict[str, Any]:
        return load_params(folder, dtype=np.float32, shardings=shardings)[1]

    return FoundModel(config, folder, stored, load)


def load_tokenizer(source: Path | None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside a model."""
    if source is None:
        raise ValueError("processing_class is missing: a Qwen3 instance has no tokenizer of its own, pass one.")
    if not any((source / name).is_file() for name in TOKENIZER_FILES):  # Transformers would make an empty tokenizer
        raise ValueError(f"{source} has no tokenizer: it needs tokenizer.json, or pass processing_class.")
    from transformers import AutoTokenizer  # here: importing it imports torch where that is installed

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{source} has no tokenizer that can be loaded ({reason}).") from None


def tiny_model(seed: int) -> tuple[Qwen3, PreTrainedTokenizerBase]:
    """The embedded default: a Qwen3 of under a million parameters with random weights, and its tokenizer."""
    tokenizer = load_tokenizer(tokenizer_path())
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3(config, rngs=nnx.Rngs(seed)), tokenizer
