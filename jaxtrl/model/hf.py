"""Hugging Face checkpoints in and out: names, layouts, `load_pretrained`, `save_pretrained`."""

import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxtrl.model import flax_folder
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import Qwen3, abstract_params, model_graphdef, model_params
from jaxtrl.model.sharding import is_shared, on_host, place
from jaxtrl.model.tensor_files import CODES, TensorSpec, open_tensors, write_tensors

# Files beside the weights that belong to the model and are carried along unchanged.
CARRIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@runtime_checkable
class TensorLike(Protocol):
    """A numpy array or a tensor in a file, which is read by `np.asarray`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


class Entry(NamedTuple):
    """Where one Hugging Face tensor lives in the parameters: `params[path][layer]`, transposed where it is a kernel."""

    name: str
    path: tuple[str, ...]
    layer: int | None
    transposed: bool
    shape: tuple[int, ...]  # in the file


def hf_layout(config: Qwen3Config) -> list[Entry]:
    """One entry per tensor of `config` in Hugging Face's format, in the order of the computation."""
    leaves = jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    layered = [path for path in shapes if path[0] == "layers"]
    out = [Entry(EMBEDDING, ("embed_tokens",), None, False, shapes["embed_tokens",])]
    for layer in range(config.num_hidden_layers):
        for path in layered:
            _, *module, kind = path
            name = f"model.layers.{layer}.{'.'.join(module)}.{'bias' if kind == 'bias' else 'weight'}"
            shape = shapes[path][1:]
            transposed = kind == "kernel"
            out.append(Entry(name, path, layer, transposed, shape[::-1] if transposed else shape))
    out.append(Entry("model.norm.weight", ("norm", "scale"), None, False, shapes["norm", "scale"]))
    if not config.tie_word_embeddings:
        out.append(Entry(HEAD, ("lm_head",), None, False, shapes["lm_head",]))
    return out


def match_tensors(config: Qwen3Config, tensors: Mapping[str, TensorLike], where: str) -> dict[str, TensorLike]:
    """The tensor of every entry of `hf_layout(config)` by name; reads no data, but for a stored copy of a tied head.

    Where the head is tied, the file may hold the embedding, the head, or both if they are equal. Raises ValueError
    naming the first missing, extra or misshaped tensor of the checkpoint `where`.
    """
    layout = hf_layout(config)
    found = dict(tensors)
    if config.tie_word_embeddings and HEAD in found:
        head = found.pop(HEAD)
        embedding = found.setdefault(EMBEDDING, head)
        if embedding is not head and not same_bytes(embedding, head):
            raise ValueError(
                f"{where}: {HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true: set it to false"
            )
    for entry in layout:
        if entry.name not in found:
            hint = "; its head is not tied (tie_word_embeddings is false)" if entry.name == HEAD else ""
            raise ValueError(f"{where}: tensor {entry.name} of shape {entry.shape} is missing{hint}")
        if tuple(found[entry.name].shape) != entry.shape:
            shape = tuple(found[entry.name].shape)
            raise ValueError(f"{where}: tensor {entry.name} has shape {shape}, but config.json makes it {entry.shape}")
    extra = sorted(found.keys() - {entry.name for entry in layout})
    if extra:
        raise ValueError(f"{where}: tensor {extra[0]} is extra: a Qwen3 of this config.json has no such parameter")
    return {entry.name: found[entry.name] for entry in layout}


def same_bytes(a: TensorLike, b: TensorLike) -> bool:
    """Whether two tensors have the same shape, dtype and bits (NaN equals itself, 0.0 is not -0.0)."""
    if (tuple(a.shape), a.dtype) != (tuple(b.shape), b.dtype):
        return False
    x, y = (np.ascontiguousarray(tensor).reshape(-1).view(np.uint8) for tensor in (a, b))
    return bool(np.array_equal(x, y))


def params_from_hf(
    config: Qwen3Config,
    tensors: Mapping[str, TensorLike],
    *,
    dtype: DTypeLike | None = None,
    where: str = "checkpoint",
    shardings: Any = None,
) -> dict[str, Any]:
    """The parameters (numpy, as `model_params` nests them) of Hugging Face tensors, in `dtype` or as they are stored.

    With `shardings` (a pytree of them like the parameters) they are device arrays that are cut so, and a process reads
    its own devices' parts. Tensors are read and placed one after the other, so the peak on the host is one copy of the
    model and one tensor or, with shardings, one parameter's parts and one tensor. Raises ValueError as `match_tensors`
    does, where one kernel has two stored dtypes in different layers, and where float16 overflows.
    """
    matched = match_tensors(config, tensors, where)
    shapes, treedef = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    entries: dict[tuple[str, ...], list[Entry]] = {}
    for entry in hf_layout(config):
        entries.setdefault(entry.path, []).append(entry)
    cut = [None] * len(shapes) if shardings is None else jax.tree.leaves(shardings)
    leaves = []
    for (path, leaf), sharding in zip(shapes, cut, strict=True):
        own = entries[tuple(key.key for key in path)]
        kind = np.dtype(dtype or matched[own[0].name].dtype)
        for entry in own:
            if dtype is None and matched[entry.name].dtype != kind:
                stored = matched[entry.name].dtype
                raise ValueError(f"{where}: tensor {entry.name} is {stored}, other layers are {kind}: give a dtype")
        leaves.append(_read_leaf(leaf.shape, kind, sharding, own, matched))
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _read_leaf(shape, dtype, sharding, entries: list[Entry], tensors: Mapping[str, TensorLike]) -> Any:
    """One parameter from the tensors of its layers: a numpy array, or a device array cut by `sharding`."""
    whole = (slice(None),) * len(shape)
    indices: dict[Any, Any] = {None: whole} if sharding is None else sharding.addressable_devices_indices_map(shape)
    parts = {_bounds(index, shape): index for index in indices.values()}
    arrays = {bounds: np.empty([end - start for start, end in bounds], dtype) for bounds in parts}
    for entry in entries:
        tensor = np.asarray(tensors[entry.name])
        tensor = tensor.T if entry.transposed else tensor
        for bounds, index in parts.items():  # layers are never cut
            part, source = arrays[bounds], tensor[index if entry.layer is None else index[1:]]
            _place(part if entry.layer is None else part[entry.layer], source, entry.name)
    if sharding is None:
        return arrays[_bounds(whole, shape)]

    def part_at(index: Any) -> np.ndarray:
        return arrays[_bounds(index, shape)]

    return jax.make_array_from_callback(shape, sharding, part_at)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))


def params_to_hf(
    config: Qwen3Config, params: Mapping[str, Any], *, dtype: DTypeLike | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every Hugging Face tensor, in `dtype` or as the parameters are, one after the other.

    A parameter that is cut over devices is put together layer by layer, by all processes that have parts of it. Raises
    ValueError where the parameters do not have the shapes of `config` and where float16 overflows.
    """
    check_params(config, params)
    for entry in hf_layout(config):
        array = on_host(_leaf(params, entry.path), entry.layer)
        array = array.T if entry.transposed else array
        if dtype is not None and array.dtype != np.dtype(dtype):
            out = np.empty(array.shape, np.dtype(dtype))
            _place(out, array, entry.name)
            array = out
        yield entry.name, array


def check_params(config: Qwen3Config, params: Mapping[str, Any], where: str = "parameters") -> None:
    """Raises ValueError where the tree or a shape of `params` is not that of a Qwen3 of `config`."""
    expected, found = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
        for tree in (abstract_params(config), params)
    )
    for name in sorted(expected.keys() | found.keys()):
        if name not in found or name not in expected:
            raise ValueError(f"{where}: {name} is {'missing' if name in expected else 'extra'} for this config")
        if tuple(found[name].shape) != expected[name].shape:
            raise ValueError(
                f"{where}: {name} has shape {tuple(found[name].shape)}, config makes it {expected[name].shape}"
            )


def _leaf(params: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        params = params[key]
    return params


def _place(target: np.ndarray, source: np.ndarray, name: str) -> None:
    """target[...] = source, with the cast between float dtypes; a value that float16 cannot hold is refused."""
    with np.errstate(over="ignore"):
        np.copyto(target, source, casting="unsafe")
    if (
        target.dtype == np.float16
        and source.dtype != np.float16
        and not np.array_equal(np.isfinite(target), np.isfinite(source))
    ):
        raise ValueError(f"tensor {name} has values beyond float16's 65504: keep it in bfloat16 or float32")


def resolve_model(name: str | Path, revision: str | None = None) -> Path:
    """The local folder of a model: a path, or the snapshot of a hub id (downloaded, or from the cache when offline).

    Raises FileNotFoundError with one sentence where neither exists.
    """
    if not str(name).strip():  # an unset variable of a shell; Path("") would be the working folder
        raise FileNotFoundError("the model's name is empty: give a checkpoint folder or a Hugging Face hub id")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    parts = str(name).split("/")
    if path.exists() or len(parts) > 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise FileNotFoundError(f"{name} is not a folder: give a checkpoint folder or a Hugging Face hub id")
    return _hub_snapshot(str(name), revision)


def _hub_snapshot(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = ["config.json", "*.safetensors", "model.safetensors.index.json", *CARRIED_FILES]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except HFValidationError:
        reason = "that is not a valid id"
    except LocalEntryNotFoundError:
        # Offline, a snapshot that lacks some of these files (other tools fetch fewer) is refused: it may well do.
        config = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(config, str):
            return Path(config).parent
        reason = "the hub cannot be reached and the local cache does not have it"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or only for those who are logged in and have access"
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise FileNotFoundError(f"{name} is no folder here, and as a Hugging Face hub id it failed: {reason}")


def load_params(
    name: str | Path, *, dtype: DTypeLike | None = None, revision: str | None = None, shardings: Any = None
) -> tuple[Qwen3Config, dict[str, Any]]:
    """(config, parameters as numpy arrays) of a Hugging Face folder, a `to-flax` folder, or a hub id.

    `dtype=None` keeps the stored one. Nothing touches a device, so a caller can place the leaves as it likes; with
    `shardings` they come as device arrays (see `params_from_hf`; of a `to-flax` folder the host reads all of them).
    """
    folder = resolve_model(name, revision)
    config = Qwen3Config.from_pretrained(folder)
    if not flax_folder.is_flax_folder(folder):
        options: dict[str, Any] = {"dtype": dtype, "where": str(folder), "shardings": shardings}
        return config, params_from_hf(config, open_tensors(folder), **options)
    params = flax_folder.read_params(folder)
    check_params(config, params, where=str(folder))
    params = params if dtype is None else _cast_in_place(params, np.dtype(dtype))
    return config, params if shardings is None else place(params, shardings)


def check_weights(folder: Path, config: Qwen3Config) -> None:
    """Raises as `load_params` would for weights that are missing, cut short or of other shapes; reads headers only."""
    if flax_folder.is_flax_folder(folder):
        check_params(config, flax_folder.read_shapes(folder), where=str(folder))
    else:
        match_tensors(config, open_tensors(folder), str(folder))


def _cast_in_place(tree: dict[str, Any], dtype: np.dtype, prefix: str = "") -> dict[str, Any]:
    for key, value in tree.items():
        if isinstance(value, dict):
            _cast_in_place(value, dtype, f"{prefix}{key}.")
        elif value.dtype != dtype:
            tree[key] = np.empty(value.shape, dtype)
            _place(tree[key], value, prefix + key)
    return tree


def load_pretrained(name: str | Path, *, dtype: DTypeLike = jnp.float32, revision: str | None = None) -> Qwen3:
    """A `Qwen3` with the weights of a folder (Hugging Face, `convert to-flax`, a training checkpoint) or a hub id.

    Parameters are `dtype`: float32 for training, or bfloat16. They go to JAX's default device one after the other.
    Raises FileNotFoundError or ValueError with one sentence naming the file, tensor or config field that is at fault.
    """
    if np.dtype(dtype) not in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype must be float32 or bfloat16, but it is {np.dtype(dtype)}: devices compute in no other")
    config, params = load_params(name, dtype=dtype, revision=revision)
    return nnx.merge(model_graphdef(config), _to_device(params))


def _to_device(tree: dict[str, Any]) -> dict[str, Any]:
    """Replaces numpy leaves by device arrays one by one, so that the host copy shrinks as the device copy grows.

    On CPU these are copies too: JAX cannot donate a buffer that numpy owns, so a first training step would hold two.
    """
    for key, value in tree.items():
        is_leaf = not isinstance(value, dict)
        tree[key] = jax.device_put(value, may_alias=False).block_until_ready() if is_leaf else _to_device(value)
    return tree


def save_pretrained(
    model: Qwen3 | tuple[Qwen3Config, Mapping[str, Any]],
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    source: str | Path | None = None,
    max_shard_size: int | str = "50GB",
) -> None:
    """Writes a model as a Hugging Face checkpoint that Transformers loads: config.json and safetensors.

    `dtype=None` keeps that of the parameters. `source` is a checkpoint folder or hub id whose tokenizer and generation
    config are carried along. Above `max_shard_size` (Transformers' default) the weights become shards with an index.
    Weight files that an earlier save left in `path` are replaced. Of several processes that have parts of the model all
    call this, and process 0 writes. Raises ValueError for parameters that do not fit the config.
    """
    config, params = (model.config, model_params(model)) if isinstance(model, Qwen3) else model
    check_params(config, params)
    tensors = params_to_hf(config, params, dtype=dtype)
    if is_shared(params) and jax.process_index() > 0:
        deque(tensors, maxlen=0)
        return
    carried = None if source is None else resolve_model(source)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    specs = tensor_specs(config, params, dtype)
    write_tensors(folder, specs, tensors, max_shard_size)
    write_config(folder, config, specs[0].dtype)
    if carried is not None:
        carry_files(carried, folder)


def tensor_specs(config: Qwen3Config, params: Mapping[str, Any], dtype: DTypeLike | None) -> list[TensorSpec]:
    """Name, shape and dtype of every tensor that `params_to_hf` is going to yield."""
    out = []
    for entry in hf_layout(config):
        stored = np.dtype(dtype or _leaf(params, entry.path).dtype)
        if stored not in CODES:
            raise ValueError(f"tensor {entry.name} cannot be saved as {stored}: take float32, bfloat16 or float16")
        out.append(TensorSpec(entry.name, entry.shape, stored))
    return out


def write_config(folder: Path, config: Qwen3Config, dtype: np.dtype) -> None:
    """Writes `config.json` with `dtype` as the dtype in which Transformers is going to load the weights."""
    partial = folder / "config.json.partial"
    content = json.dumps({**config.to_dict(), "dtype": dtype.name}, indent=2, sort_keys=True) + "\n"
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, folder / "config.json")


def carry_files(source: Path, folder: Path) -> None:
    """Copies tokenizer and generation config files, where they are another folder's."""
    if source.resolve() == folder.resolve():
        return
    for name in CARRIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
