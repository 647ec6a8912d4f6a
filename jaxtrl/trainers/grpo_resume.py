"""What a checkpoint of GRPO holds besides state and position: what must not change, and the finished groups.

The groups are one npz file of plain arrays, nothing pickled.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rollout.groups import Group
from jaxtrl.rollout.requests import Completion
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.train.checkpoint import CheckpointError
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.grpo_data import PromptData

GROUPS_FILE = "groups.npz"
TOKEN_COLUMNS = {"token_ids": np.int32, "logps": np.float32, "sampled_logps": np.float32, "versions": np.int32}


FACTS = (
    "num_generations",
    "max_completion_length",
    "seed",
    "loss_type",
    "num_iterations",
    "weight_sync_steps",
    "beta",
    "importance_sampling_level",
    "importance_sampling_mode",
    "recompute_old_logps",
    "drop_zero_std_groups",
)


def run_facts(
    args: AsyncGRPOConfig,
    data: PromptData,
    shape: ShapeClass,
    sizes: tuple[int, int],
    dtype: Any,
    config: Qwen3Config,
    reference: int | None,
) -> dict[str, Any]:
    """What decides groups and programs, and so must not change between saving and resuming (JSON values).

    `sizes`: groups per step and devices; `reference`: a checksum of the reference model, which is read anew.
    """
    return {
        "the number of prompts": len(data.prompts),
        "the prompts (checksum)": data.fingerprint,
        "groups per step": sizes[0],
        "the number of devices": sizes[1],
        "the shape class": list(shape),
        "the order": args.shuffles,
        "the order's seed": args.order_seed,
        "the compute dtype": str(dtype),
        "the model's config": config.to_dict(),
        "the reference model (checksum)": reference,
        **{name: getattr(args, name) for name in FACTS},
        **({"the number of processes": jax.process_count()} if jax.process_count() > 1 else {}),
    }


def pack_groups(groups: Sequence[Group]) -> bytes:
    """The groups as the bytes of a file; what has an entry per token is one array over all completions."""
    completions = [completion for group in groups for completion in group.completions]
    arrays: dict[str, np.ndarray] = {
        name: np.concatenate([np.zeros(0, dtype), *[getattr(completion, name) for completion in completions]]).astype(
            dtype
        )
        for name, dtype in TOKEN_COLUMNS.items()
    }
    arrays["rewards"] = np.concatenate([np.zeros(0, np.float32), *[group.rewards.ravel() for group in groups]])
    arrays["rest"] = np.frombuffer(json.dumps([_rest(group) for group in groups]).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def read_groups(path: Path) -> list[Group]:
    """The groups of the checkpoint at `path`. Raises CheckpointError where its file is missing or damaged."""
    try:
        return unpack_groups((path / GROUPS_FILE).read_bytes())
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise CheckpointError(
            f"{path / GROUPS_FILE} cannot be read ({error}): it is no checkpoint of GRPO, or damaged; use another."
        ) from None


def unpack_groups(content: bytes) -> list[Group]:
    """What `pack_groups` packed, bit for bit."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {name: file[name] for name in (*TOKEN_COLUMNS, "rewards", "rest")}
    groups, token, reward = [], 0, 0
    for rest in json.loads(arrays["rest"].tobytes()):
        completions = []
        for length, fields in zip(rest.pop("lengths"), rest.pop("completions"), strict=True):
            columns = {name: arrays[name][token : token + length] for name in TOKEN_COLUMNS}
            completions.append(Completion(**columns, **fields))
            token += length
        count = len(completions)
        functions = rest.pop("functions")
        rewards = arrays["rewards"][reward : reward + count * functions].reshape(count, functions)
        reward += count * functions
        failed, texts = np.array(rest.pop("failed"), bool), tuple(rest.pop("texts"))
        groups.append(Group(completions=tuple(completions), rewards=rewards, failed=failed, texts=texts, **rest))
    return groups


def _rest(group: Group) -> dict[str, Any]:
    """What is left of a group, JSON values."""
    of_completion = ("prompt_index", "generation_index", "finish_reason", "stop")
    return {
        **{name: getattr(group, name) for name in ("number", "row", "admitted", "finished", "scored", "worker")},
        "prompt_ids": [int(token) for token in group.prompt_ids],
        "texts": list(group.texts),
        "failed": group.failed.tolist(),
        "functions": group.rewards.shape[1],
        "lengths": [len(completion.token_ids) for completion in group.completions],
        "completions": [{name: getattr(one, name) for name in of_completion} for one in group.completions],
    }
