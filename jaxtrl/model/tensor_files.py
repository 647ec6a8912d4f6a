"""Safetensors files, read and written one tensor at a time (format: https://github.com/huggingface/safetensors).

The safetensors package wants all tensors of a file in memory to write it, and maps files into memory to read them; here
no more than one tensor is held at a time, bfloat16 is a numpy dtype (ml_dtypes), and each fault has its own sentence.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `np.asarray(tensor)` reads it. ValueError where the file is shorter than its header says."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            if file.readinto(out.reshape(-1).view(np.uint8).data) != out.nbytes:
                raise ValueError(f"{self.file} ends inside tensor {self.name}: the file is truncated, copy it again")
        return out if dtype is None else out.astype(dtype, copy=False)


class TensorSpec(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of a checkpoint folder, from `model.safetensors` or the shards of the index; reads headers only.

    Raises FileNotFoundError for a missing weights or shard file and ValueError for anything that is inconsistent.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file() and index.is_file():
        raise ValueError(f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}: remove the one that is left over")
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _open_shards(folder, _read_weight_map(index))
    others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf"))
    if others:
        raise FileNotFoundError(
            f"{folder} has {others[0]} but no {SINGLE_FILE}: only safetensors is read, convert the weights with "
            "Transformers' save_pretrained"
        )
    raise FileNotFoundError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _read_weight_map(index: Path) -> dict[str, str]:
    content = _parse_json(index.read_bytes(), str(index))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map: it must say which file holds each tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{index} sends tensor {name} to {file!r}: it must be a .safetensors file of the same folder"
            )
    return weight_map


def _open_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    out: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(weight_map.values()):
        if not (folder / file).is_file():
            first = next(name for name, shard in weight_map.items() if shard == file)
            raise FileNotFoundError(f"{folder / file} is missing: {INDEX_FILE} says that it holds {first}")
        for name, tensor in read_header(folder / file).items():
            if name in out:
                raise ValueError(
                    f"tensor {name} is duplicate: it is in {out[name].file.name} and in {file} of {folder}"
                )
            out[name] = tensor
    for name, tensor in out.items():
        if name not in weight_map:
            raise ValueError(f"{tensor.file} has tensor {name}, which {INDEX_FILE} does not list")
        if weight_map[name] != tensor.file.name:
            raise ValueError(f"tensor {name} is in {tensor.file}, but {INDEX_FILE} says {weight_map[name]}")
    for name, file in weight_map.items():
        if name not in out:
            raise ValueError(f"tensor {name} is missing in {folder / file}, where {INDEX_FILE} says that it is")
    return out


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of one safetensors file, in the order of their bytes. Raises ValueError for a damaged file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        if prefix == b"version ":
            raise ValueError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` or download it again")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise ValueError(f"{path} is truncated or no safetensors file: its {size} bytes do not hold its header")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is corrupt: its header claims {length} bytes")
        header = _parse_json(file.read(length), f"the header of {path}")
    if not isinstance(header, dict):
        raise ValueError(f"the header of {path} is corrupt: it must be a JSON object")
    entries = [_parse_entry(path, name, entry) for name, entry in header.items() if name != "__metadata__"]
    position = 0
    out = {}
    for begin, end, name, dtype, shape in sorted(entries, key=lambda entry: entry[:2]):
        if begin != position:
            raise ValueError(f"the header of {path} is corrupt: tensor {name} starts at {begin} instead of {position}")
        position = end
        out[name] = StoredTensor(path, name, dtype, shape, 8 + length + begin)
    if 8 + length + position > size:
        raise ValueError(f"{path} is truncated: it has {size} of {8 + length + position} bytes, copy it again")
    if 8 + length + position < size:
        raise ValueError(f"{path} is corrupt: {size - 8 - length - position} bytes follow its last tensor")
    return out


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[int, int, str, np.dtype, tuple[int, ...]]:
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"the header of {path} is corrupt: the entry of tensor {name} is {entry!r}") from None
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"the header of {path} is corrupt: the entry of tensor {name} is {entry!r}")
    if code not in DTYPES:
        raise ValueError(f"tensor {name} in {path} has dtype {code}: only {', '.join(DTYPES)} are supported")
    if end - begin != TensorSpec(name, tuple(shape), DTYPES[code]).nbytes:
        raise ValueError(f"the header of {path} is corrupt: tensor {name} of shape {shape} has {end - begin} bytes")
    return begin, end, name, DTYPES[code], tuple(shape)


def _parse_json(content: bytes, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            names = [name for name, _ in pairs]
            duplicate = next(name for name in names if names.count(name) > 1)
            raise DuplicateName(f"tensor or key {duplicate} is duplicate in {where}")
        return out

    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except DuplicateName as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{where} is corrupt: it is not valid JSON ({error})") from None


class DuplicateName(Exception):
    """Leaves the JSON parser when a name is there twice."""


def parse_size(size: int | str) -> int:
    """Bytes of `5GB`, `200MB`, ... (powers of 1000, as in Transformers) or of an int. Raises ValueError."""
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"(\d+)\s*([KMGT]?B)", str(size).strip().upper())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"max_shard_size must be a positive number of bytes or look like '5GB', but it is {size!r}")
    return int(match[1]) * {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[match[2]]


def plan_shards(specs: Sequence[TensorSpec], max_shard_size: int) -> list[list[TensorSpec]]:
    """Cuts the tensors, in order, into shards of at most `max_shard_size` bytes (more where one tensor is larger)."""
    shards: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not shards or filled + spec.nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def write_tensors(
    folder: Path, specs: Sequence[TensorSpec], arrays: Iterable[tuple[str, np.ndarray]], max_shard_size: int | str
) -> None:
    """Writes `arrays`, which come in the order of `specs`, as one file or as shards with an index.

    Each file is written under another name and renamed once all are complete; weight files of an earlier save are
    removed.
    """
    shards = plan_shards(specs, parse_size(max_shard_size))
    names = [SINGLE_FILE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    iterator = iter(arrays)
    for name, shard in zip(names, shards, strict=True):
        with open(folder / f"{name}.partial", "wb") as file:
            _write_shard(file, shard, iterator)
    for name in names:
        os.replace(folder / f"{name}.partial", folder / name)
    if len(shards) > 1:
        _write_index(folder, names, shards)
        names.append(INDEX_FILE)
    for old in [folder / SINGLE_FILE, folder / INDEX_FILE, *folder.glob("model-*-of-*.safetensors")]:
        if old.name not in names:
            old.unlink(missing_ok=True)


def _shard_name(i: int, count: int) -> str:
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _write_shard(file: BinaryIO, shard: Sequence[TensorSpec], arrays: Iterator[tuple[str, np.ndarray]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Transformers reads no file without it
    position = 0
    for spec in shard:
        offsets = [position, position + spec.nbytes]
        header[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        position += spec.nbytes
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    file.write(len(content).to_bytes(8, "little") + content)
    for spec in shard:
        name, array = next(arrays)
        if (name, array.shape, array.dtype) != spec:
            raise ValueError(f"expected {spec}, got {name} of shape {array.shape} and dtype {array.dtype}")
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _write_index(folder: Path, names: Sequence[str], shards: Sequence[Sequence[TensorSpec]]) -> None:
    specs = [spec for shard in shards for spec in shard]
    index = {
        "metadata": {
            "total_parameters": sum(spec.nbytes // spec.dtype.itemsize for spec in specs),
            "total_size": sum(spec.nbytes for spec in specs),
        },
        "weight_map": {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard},
    }
    partial = folder / f"{INDEX_FILE}.partial"
    partial.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, folder / INDEX_FILE)
