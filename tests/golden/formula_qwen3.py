"""Qwen3 weights of any shape from fixture T's formula, so that golden numbers can be checked without torch."""

from typing import Any

import numpy as np

from tests.fixture_t import CONFIG, values


def make_config(**changes: Any) -> dict[str, Any]:
    """A Hugging Face `config.json` as a dict: fixture T's with some fields changed."""
    return CONFIG | {"max_position_embeddings": 1024} | changes


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 weights in [out, in] layout; number j is the place in the sorted names.

    Matrices are 0.6 u and norms 1 + 0.4 u, as in fixture T (`u` uniform in +-0.5); biases are 0.4 u, with j + 200; an
    untied head has j = 99.
    """
    shapes = _shapes(config)
    out = {name: values(j, shape) for j, (name, shape) in enumerate(sorted(shapes.items()))}
    if config["attention_bias"]:
        names = sorted(name for name in out if name.endswith("_proj.weight") and ".self_attn." in name)
        for j, name in enumerate(names):
            out[name.replace(".weight", ".bias")] = values(200 + j, shapes[name][:1]) - 1
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = values(99, (config["vocab_size"], config["hidden_size"]))
    return out


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, mlp, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        out |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return out
