"""Fixture T: a tiny Qwen3 whose weights come from a formula, so that any framework can rebuild it.

Parameter names (Hugging Face names, lm_head left out) in sorted order have index j; flat index i runs in C order:
u = frac(sin(12.9898 (i + 1) + 78.233 (j + 1)) * 43758.5453) - 0.5 in float64; matrices are 0.6 u, norm vectors
1 + 0.4 u, cast to float32. An untied head has j = 99.
"""

import numpy as np

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
R1 = [5, 9, 12, 3]
R1_NLL = [6.148989, 4.370646, 4.605965]
R2 = [7, 7, 20, 31, 2, 14, 3, 8]
R2_NLL = [4.878929, 4.845292, 4.555349, 4.799830, 5.479170, 6.145475, 7.537739]


def values(j: int, shape: tuple[int, ...]) -> np.ndarray:
    """Weights number j, float32, in Hugging Face layout ([out, in])."""
    i = np.arange(int(np.prod(shape)), dtype=np.float64)
    u = np.sin(12.9898 * (i + 1) + 78.233 * (j + 1)) * 43758.5453
    u = u - np.floor(u) - 0.5
    return (0.6 * u if len(shape) > 1 else 1 + 0.4 * u).reshape(shape).astype(np.float32)


def shapes() -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every stored tensor, the head left out."""
    hidden, mlp, heads, kv, d = 32, 48, 4, 2, 16
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        out |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (heads * d, hidden),
                "self_attn.k_proj": (kv * d, hidden),
                "self_attn.v_proj": (kv * d, hidden),
                "self_attn.o_proj": (hidden, heads * d),
                "self_attn.q_norm": (d,),
                "self_attn.k_norm": (d,),
                "mlp.gate_proj": (mlp, hidden),
                "mlp.up_proj": (mlp, hidden),
                "mlp.down_proj": (hidden, mlp),
            }.items()
        }
    return out


def tensors(tie: bool = True) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 array; with `lm_head.weight` when not tied."""
    out = {name: values(j, shape) for j, (name, shape) in enumerate(sorted(shapes().items()))}
    if not tie:
        out["lm_head.weight"] = values(99, (64, 32))
    return out
