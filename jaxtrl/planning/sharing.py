"""The second account of a plan, sharing: how many tokens a prefix trie saves, and whether tree rows pay."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rows.batch import Sample
from jaxtrl.rows.sharing import sort_by_tree
from jaxtrl.rows.tree import RowCosts, TreePlan, plan_trees
from jaxtrl.rows.trie import Sequences
from jaxtrl.train.flops import Flops, train_flops

PAYS = 1.05  # tree rows are worth it from this speed-up on: planning them takes time and memory too


def share_account(
    samples: Sequence[Sample],
    token_budget: int,
    config: Qwen3Config,
    remat: str,
    itemsize: int,
    levels: dict[str, Int[np.ndarray, " samples"]],
    block_size: int,
) -> dict[str, Any]:
    """Tokens, ratios, counted speed-up and memory of tree rows against packed rows of the same samples.

    Samples longer than `token_budget` must have been cut; those of one `group` always share. `levels`: by name, the
    number of each sample's group or trajectory, within which sharing is counted too; `itemsize` is that of the compute
    dtype in bytes.
    """
    plan = plan_trees(samples, token_budget, block_size=block_size)
    tree, packed = (_flops(config, costs, remat, block_size) for costs in (plan.tree, plan.packed))
    speedup = packed.total / max(tree.total, 1.0)
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    layer_inputs = config.num_hidden_layers * config.hidden_size * itemsize
    return {
        "raw_tokens": plan.raw_tokens,
        "unique_tokens": plan.unique_tokens,
        "packing_ratio": plan.ratio,
        "ratio_by": _levels(samples, plan, levels),
        "token_budget": token_budget,
        "rows": {"tree": plan.tree.rows, "packed": plan.packed.rows},
        "split_groups": plan.split_groups,
        "repeated_tokens": plan.repeated_tokens,
        "flops": {"tree": tree._asdict(), "packed": packed._asdict()},
        "speedup": speedup,
        "speedup_by_part": {
            name: getattr(packed, name) / max(getattr(tree, name), 1.0) for name in ("linear", "attention", "head")
        },
        "kv_bytes": {"tree": plan.tree.kv_bytes(kv_bytes), "packed": plan.packed.kv_bytes(kv_bytes)},
        "activation_bytes": {"tree": plan.tree.tokens * layer_inputs, "packed": plan.packed.tokens * layer_inputs},
        "tree_rows_pay": speedup >= PAYS,
    }


def _flops(config: Qwen3Config, costs: RowCosts, remat: str, block_size: int) -> Flops:
    """Loss and gradient of all rows; attention computes whole blocks."""
    return train_flops(config, costs.tokens, costs.blocks * block_size**2, costs.slots, remat=remat)


def _levels(
    samples: Sequence[Sample], plan: TreePlan, levels: dict[str, Int[np.ndarray, " samples"]]
) -> dict[str, dict[str, float | int]]:
    """Raw over unique tokens where only samples of one number share, of exact tries without a row limit."""
    sequences = Sequences.join([sample.input_ids for sample in samples])
    everything = sort_by_tree(sequences, None)
    order = everything.order
    out: dict[str, dict[str, float | int]] = {}
    for name, number in {**levels, "tree": plan.share, "set": np.zeros(len(samples), np.int64)}.items():
        chosen = np.argsort(number[order], kind="stable")
        members = number[order[chosen]]
        own = sequences.length[order[chosen]] - everything.select(sequences, chosen, members)
        _, index = np.unique(members, return_inverse=True)
        raw, unique = (np.bincount(index, values) for values in (sequences.length[order[chosen]], own))
        ratios = raw / np.maximum(unique, 1)
        out[name] = {
            "count": len(raw),
            "raw_tokens": int(raw.sum()),
            "unique_tokens": int(unique.sum()),
            "ratio": float(raw.sum() / max(unique.sum(), 1)),
            "lowest": float(ratios.min()),
            "median": float(np.median(ratios)),
            "highest": float(ratios.max()),
        }
    return out
