"""`python -m jaxtrl.convert {to-flax,to-hf,verify} SRC DST`: checkpoints between Hugging Face and Orbax, and their
check.

With no arguments it converts a tiny random model there and back in a temporary folder and verifies each step.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxtrl.model import flax_folder
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import (
    TensorLike,
    carry_files,
    load_params,
    load_pretrained,
    match_tensors,
    params_to_hf,
    resolve_model,
    same_bytes,
    save_pretrained,
    tensor_specs,
    write_config,
)
from jaxtrl.model.qwen3 import init_params
from jaxtrl.model.tensor_files import open_tensors
from jaxtrl.rows.blocks import block_tables

DTYPES: dict[str, DTypeLike | None] = {
    "keep": None,
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
}
LOGITS_TOLERANCE = 1e-5  # of the largest logit, float32
TINY = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=1e6,
    tie_word_embeddings=True,
)


def to_flax(source: str | Path, target: str | Path, *, dtype: DTypeLike | None = None) -> None:
    """Writes a checkpoint as an Orbax checkpoint (`params/`) beside config.json and tokenizer files.

    `source` is a Hugging Face folder or a hub id, `target` a new or empty folder; `dtype=None` keeps the stored one.
    Raises ValueError or OSError with one sentence.
    """
    origin, folder = _folders(source, target)
    if flax_folder.is_flax_folder(origin):
        raise ValueError(f"{source} is an Orbax checkpoint already: to-flax takes Hugging Face's format, use to-hf")
    config, params = load_params(origin, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    flax_folder.write_params(folder, params)
    carry_files(origin, folder)
    write_config(folder, config, tensor_specs(config, params, None)[0].dtype)


def to_hf(
    source: str | Path, target: str | Path, *, dtype: DTypeLike | None = None, max_shard_size: int | str = "50GB"
) -> None:
    """Writes an Orbax checkpoint (of `to_flax`, or of a training run) in Hugging Face's format, which Transformers
    loads. The other arguments and errors are `to_flax`'s."""
    origin, folder = _folders(source, target)
    if not flax_folder.is_flax_folder(origin) and any(origin.glob("*.safetensors")):
        raise ValueError(
            f"{source} is in Hugging Face's format already: to-hf takes an Orbax checkpoint (of to-flax, or a "
            "checkpoint-STEP of a training run); copy the folder, or use to-flax first to cast or shard it anew"
        )
    save_pretrained(load_params(origin, dtype=dtype), folder, source=origin, max_shard_size=max_shard_size)


def _folders(source: str | Path, target: str | Path) -> tuple[Path, Path]:
    origin, folder = resolve_model(source), Path(target).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: give a new one")
    return origin, folder


class Comparison(NamedTuple):
    """What `compare_tensors` found; `differences` has one line per config field or tensor that differs."""

    tensors: int
    identical: int
    differences: list[str]


def compare_tensors(a: str | Path, b: str | Path, *, tolerance: float = 0.0) -> Comparison:
    """Compares two checkpoints of either format, config field by field and tensor by tensor.

    Tensors are `identical` if dtype and bytes are equal. They differ if a name or shape does, or a value by more than
    `tolerance` (absolute; values stored in two dtypes are compared as float32), or if one of them is not finite.
    """
    (config_a, tensors_a), (config_b, tensors_b) = (open_checkpoint(resolve_model(name)) for name in (a, b))
    fields_a, fields_b = config_a.to_dict(), config_b.to_dict()
    differences = [
        f"config.json: {name} is {fields_a[name]!r} in {a} and {fields_b[name]!r} in {b}"
        for name in fields_a
        if fields_a[name] != fields_b[name]
    ]
    names = list(dict.fromkeys([*tensors_a, *tensors_b]))
    identical = 0
    for name in names:
        if name not in tensors_a or name not in tensors_b:
            differences.append(f"{name} is only in {a if name in tensors_a else b}")
            continue
        x, y = np.asarray(tensors_a[name]), np.asarray(tensors_b[name])
        identical += same_bytes(x, y)
        difference = _difference(x, y, tolerance)
        if difference is not None:
            differences.append(f"{name} {difference}")
    return Comparison(len(names), identical, differences)


def open_checkpoint(folder: Path) -> tuple[Qwen3Config, Mapping[str, TensorLike]]:
    """(config, Hugging Face name -> tensor) of a folder of either format; files are read when asked for."""
    if flax_folder.is_flax_folder(folder):
        config, params = load_params(folder)
        return config, dict(params_to_hf(config, params))
    config = Qwen3Config.from_pretrained(folder)
    return config, match_tensors(config, open_tensors(folder), str(folder))


def _difference(x: np.ndarray, y: np.ndarray, tolerance: float) -> str | None:
    if x.shape != y.shape:
        return f"has shape {x.shape} and {y.shape}"
    x, y = x.astype(np.float32), y.astype(np.float32)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return "has values that are not finite"
    largest = float(np.abs(x - y).max())
    return f"differs by up to {largest:.3g}" if largest > tolerance else None


def compare_logits(ours: str | Path, theirs: str | Path, tokens: int = 16) -> tuple[float, float]:
    """(largest difference, largest logit) of jaxtrl on `ours` and Transformers on `theirs`, float32, on fixed random
    ids.

    Needs torch; `theirs` must be in Hugging Face's format.
    """
    vocab_size = Qwen3Config.from_pretrained(resolve_model(ours)).vocab_size
    ids = np.random.Generator(np.random.Philox(0)).integers(0, vocab_size, tokens, dtype=np.int32)
    x, y = jaxtrl_logits(ours, ids), transformers_logits(theirs, ids)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"the logits of {ours} or {theirs} are not finite: the weights are damaged")
    return float(np.abs(x - y).max()), float(np.abs(y).max())


def jaxtrl_logits(name: str | Path, ids: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n vocab"]:
    """Float32 logits of one causal sequence, computed here."""
    model = load_pretrained(name)
    visible_until = np.full(len(ids), len(ids), np.int32)
    tables = block_tables(visible_until, len(ids))
    hidden = model(ids, np.arange(len(ids), dtype=np.int32), visible_until, tables)
    return np.asarray(jnp.dot(hidden, model.head_weight().T, precision="highest"))


def transformers_logits(name: str | Path, ids: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n vocab"]:
    """Float32 logits of one causal sequence, computed by Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


def verify(a: str | Path, b: str | Path, *, tolerance: float = 0.0, logits: bool = True) -> bool:
    """Prints how two checkpoints differ in tensors and, where torch is installed, in logits; True if they are the
    same.
    """
    result = compare_tensors(a, b, tolerance=tolerance)
    same = not result.differences
    print(
        f"{result.tensors} tensors: {result.identical} identical in every byte, {len(result.differences)} differences"
    )
    for line in result.differences[:20]:
        print(f"  {line}")
    if len(result.differences) > 20:
        print(f"  and {len(result.differences) - 20} more")
    # Transformers reads one of the two, jaxtrl the other one where possible.
    hugging_face = [name for name in (b, a) if not flax_folder.is_flax_folder(resolve_model(name))]
    if not logits:
        return same
    if not hugging_face or importlib.util.find_spec("torch") is None:
        reason = "neither checkpoint is in Hugging Face's format" if not hugging_face else "torch is not installed"
        print(f"logits: not compared with Transformers, {reason}")
        return same
    theirs = hugging_face[0]
    difference, largest = compare_logits(a if theirs == b else b, theirs)
    limit = max(LOGITS_TOLERANCE * max(largest, 1.0), tolerance)
    print(
        f"logits: jaxtrl and Transformers differ by up to {difference:.2e} (limit {limit:.2e}, largest {largest:.3g})"
    )
    return same and difference <= limit


def round_trip() -> bool:
    """Converts a tiny random model to both formats and back in a temporary folder; True if every step is exact."""
    same = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_pretrained((TINY, init_params(TINY, 0)), folder / "hf", dtype=jnp.bfloat16)
        to_flax(folder / "hf", folder / "flax")
        to_hf(folder / "flax", folder / "back", max_shard_size="50KB")
        for name in ("flax", "back"):
            print(f"tiny random model, bfloat16: hf against {name}")
            same &= verify(folder / "hf", folder / name)
    return same


def _tolerance(text: str) -> float:
    """A number from 0 on; with NaN no difference would ever be too large."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxtrl.convert", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="{to-flax,to-hf,verify}")
    for name, source, text in (
        ("to-flax", "a Hugging Face folder or hub id", "write SRC as an Orbax checkpoint"),
        (
            "to-hf",
            "an Orbax checkpoint: of to-flax, or a checkpoint-STEP of a training run",
            "write SRC as a Hugging Face checkpoint (safetensors)",
        ),
        (
            "verify",
            "a folder of either format, or a hub id",
            "compare two checkpoints tensor by tensor, and logits with Transformers where torch is installed",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("source", metavar="SRC", help=source)
        command.add_argument("target", metavar="DST", help="a checkpoint" if name == "verify" else "a new folder")
        if name == "verify":
            command.add_argument(
                "--tolerance", type=_tolerance, default=0.0, help="largest allowed absolute difference (0)"
            )
            command.add_argument("--no_logits", action="store_true", help="compare tensors only")
        else:
            command.add_argument("--dtype", choices=DTYPES, default="keep", help="cast the weights (keep)")
        if name == "to-hf":
            command.add_argument("--max_shard_size", default="50GB", help="bytes in a file, like 5GB (50GB)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 on success, 1 with one line on failure or where `verify` finds a difference."""
    arguments = _parser().parse_args(argv)
    try:
        return 0 if _run(arguments) else 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(arguments: Any) -> bool:
    if arguments.command is None:
        return round_trip()
    if arguments.command == "verify":
        return verify(arguments.source, arguments.target, tolerance=arguments.tolerance, logits=not arguments.no_logits)
    dtype = DTYPES[arguments.dtype]
    if arguments.command == "to-flax":
        to_flax(arguments.source, arguments.target, dtype=dtype)
    else:
        to_hf(arguments.source, arguments.target, dtype=dtype, max_shard_size=arguments.max_shard_size)
    print(f"wrote {arguments.target}")
    return True


if __name__ == "__main__":
    sys.exit(main())
