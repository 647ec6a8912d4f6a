"""The shape of a Qwen3 model, read from and written to Hugging Face's `config.json`."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "Qwen3ForCausalLM"


@dataclass(frozen=True)
class Qwen3Config:
    """A dense Qwen3 decoder. Names and defaults are those of Transformers' `Qwen3Config`.

    `head_dim` is a number of its own (128 by default), not `hidden_size / num_attention_heads`. `rope_theta` stands for
    both spellings of config.json (`rope_theta` and `rope_parameters.rope_theta`). `eos_token_id` is one id, several, or
    none. The object is hashable, so it can be a static argument of `jax.jit`. Raises ValueError for impossible sizes.
    """

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    eos_token_id: int | tuple[int, ...] | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        _check_fields(vars(self))

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> "Qwen3Config":
        """The config of a parsed `config.json`. A missing field has Transformers' default, except RoPE's theta.

        Raises ValueError, with the name of the field, for everything that changes the result and is not supported:
        other model types, RoPE scaling, sliding window attention, quantised weights, another activation, dropout.
        Fields that do not change the result are ignored.
        """
        refuse_unsupported(fields)
        known = {f.name for f in dataclasses.fields(Qwen3Config)} - {"rope_theta"}
        values = {name: value for name, value in fields.items() if name in known}
        if values.get("num_key_value_heads", 0) is None:
            values["num_key_value_heads"] = values.get("num_attention_heads", Qwen3Config.num_attention_heads)
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        values["rope_theta"] = _rope_theta(fields)
        _check_fields({**vars(Qwen3Config()), **values})
        return Qwen3Config(**values)

    @staticmethod
    def from_pretrained(folder: str | Path) -> "Qwen3Config":
        """The config of a local checkpoint folder. Raises FileNotFoundError or ValueError with the file's name."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: a checkpoint folder needs the model's config.json")
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{path} must hold a JSON object, but it holds a {type(fields).__name__}")
        try:
            return Qwen3Config.from_dict(fields)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The fields of `config.json` for Transformers, theta in both spellings so that version 4 reads it too."""
        fields: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "qwen3"}
        fields |= dataclasses.asdict(self)
        if isinstance(self.eos_token_id, tuple):
            fields["eos_token_id"] = list(self.eos_token_id)
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": self.rope_theta}
        fields |= {"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None}
        fields |= {"use_cache": True}
        return fields


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def _check_fields(values: Mapping[str, Any]) -> None:
    for name in _SIZES:
        if type(values[name]) is not int or values[name] < 1:
            raise ValueError(f"{name} must be a positive integer, but it is {values[name]!r}")
    for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
        if type(values[name]) not in (int, float) or not 0 < values[name] < float("inf"):
            raise ValueError(f"{name} must be a positive number, but it is {values[name]!r}")
    for name in ("tie_word_embeddings", "attention_bias"):
        if type(values[name]) is not bool:
            raise ValueError(f"{name} must be true or false, but it is {values[name]!r}")
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        ids = values[name] if name == "eos_token_id" and isinstance(values[name], tuple) else (values[name],)
        if not all(i is None or type(i) is int for i in ids):
            raise ValueError(f"{name} must be a token id or null, but it is {values[name]!r}")
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if values["head_dim"] % 2:
        raise ValueError(f"head_dim must be even for RoPE, but it is {values['head_dim']}")


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Raises ValueError, naming the field, where `config.json` asks for a computation that jaxtrl does not have."""
    model_type = fields.get("model_type")
    if model_type != "qwen3":
        raise ValueError(f"model_type {model_type!r} is not supported: jaxtrl trains dense Qwen3 models ('qwen3')")
    architectures = fields.get("architectures")
    if architectures and ARCHITECTURE not in architectures:
        raise ValueError(f"architectures {architectures!r} is not supported: jaxtrl loads {ARCHITECTURE}")
    if fields.get("quantization_config") or fields.get("compression_config"):
        name = "quantization_config" if fields.get("quantization_config") else "compression_config"
        raise ValueError(f"{name} is not supported: take the checkpoint with unquantised weights")
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {fields['hidden_act']!r} is not supported: Qwen3's activation is 'silu'")
    if fields.get("attention_dropout"):
        raise ValueError(f"attention_dropout {fields['attention_dropout']!r} is not supported: set it to 0.0")
    _refuse_sliding_window(fields)
    _refuse_rope_scaling(fields)


def _refuse_sliding_window(fields: dict[str, Any]) -> None:
    layers = fields.get("num_hidden_layers", Qwen3Config.num_hidden_layers)
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if other:
            raise ValueError(f"layer_types with {other[0]!r} is not supported: every layer must be 'full_attention'")
        if len(layer_types) != layers:
            raise ValueError(f"layer_types has {len(layer_types)} entries for num_hidden_layers {layers}")
        return
    # Transformers slides the layers from max_window_layers on, so a window may be set and never be used.
    window = fields.get("sliding_window", 4096)
    if fields.get("use_sliding_window") and window is not None and fields.get("max_window_layers", 28) < layers:
        raise ValueError("use_sliding_window is not supported: every layer must attend to the whole sequence")


def _rope_settings(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The RoPE dictionaries of a config by the name they stand under: `rope_parameters`, formerly `rope_scaling`."""
    found = {name: fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name) is not None}
    for name, settings in found.items():
        if not isinstance(settings, dict):
            raise ValueError(f"{name} must be an object, but it is {settings!r}")
        nested = [key for key, value in settings.items() if isinstance(value, dict)]
        if nested:
            raise ValueError(f"{name}.{nested[0]} is not supported: RoPE must be the same in every layer")
    return found


def _refuse_rope_scaling(fields: dict[str, Any]) -> None:
    for name, settings in _rope_settings(fields).items():
        for key in ("rope_type", "type"):
            kind = settings.get(key)
            if kind is not None and kind != "default":
                raise ValueError(f"{name}.{key} {kind!r} is not supported: only unscaled RoPE ('default') is")
    for name, settings in {"": fields, **_rope_settings(fields)}.items():
        factor = settings.get("partial_rotary_factor")
        if factor is not None and factor != 1:
            where = f"{name}.partial_rotary_factor" if name else "partial_rotary_factor"
            raise ValueError(f"{where} {factor!r} is not supported: RoPE turns the whole head in Qwen3")


def _rope_theta(fields: dict[str, Any]) -> float:
    """Theta from whichever spelling is there. A default of 10000 would be wrong for every Qwen3, so none is assumed."""
    spellings = {"": fields, **_rope_settings(fields)}
    found = {
        f"{name}.rope_theta" if name else "rope_theta": settings["rope_theta"]
        for name, settings in spellings.items()
        if settings.get("rope_theta") is not None
    }
    if not found:
        raise ValueError("rope_theta is missing: it must stand at the top level or in rope_parameters")
    if len(set(found.values())) > 1:
        raise ValueError(" and ".join(f"{name} {value!r}" for name, value in found.items()) + " contradict each other")
    theta = next(iter(found.values()))
    if type(theta) not in (int, float):
        raise ValueError(f"{next(iter(found))} must be a number, but it is {theta!r}")
    return float(theta)
