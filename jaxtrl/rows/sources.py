"""Where rows come from: files, a data set in the hub cache, data sets and lists in memory.

JSON, JSON lines and CSV are read here, line by line, for two reasons. An error can name its file and line; and Arrow
would unify the structs of a column, so that a key which one message has (`tool_calls`) appears in all others as
`None`, and tool schemas of different shape get mixed. Nested values are stored as JSON text instead, in columns of
the feature type `datasets.Json`, which gives the original objects back.
"""

import csv
import glob
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
CHUNK_ROWS = 4096

Rows = Iterator[tuple[int, dict[str, Any]]]  # (line or element number, row)


def load_source(
    source: Any,
    *,
    split: str = "train",
    name: str | None = None,
    streaming: bool = False,
    trust_remote_code: bool = False,
) -> Dataset | IterableDataset:
    """A data set from whatever a user may name.

    Args:
        source: path, glob pattern or list of paths of JSON, JSONL, CSV, TSV (first line: column names; every cell is
            text) or Parquet files; a folder; a data set id in the hub cache; a list of dicts; a `Dataset`,
            `IterableDataset` or dict of them by split.
        split: the split, or a slice of it such as `train[:100]`. Files have one split, `train`.
        name: configuration of a hub data set.
        streaming: read rows as they are used (gives an `IterableDataset`).

    Raises:
        FileNotFoundError: nothing there. ValueError: unreadable content, naming file and line.
    """
    if trust_remote_code:
        raise ValueError(
            "trust_remote_code does not apply to data sets: loading scripts are not run; pass the data as JSON, CSV "
            "or Parquet files"
        )
    if isinstance(source, DatasetDict | IterableDatasetDict):
        if split not in source:
            raise ValueError(f"the data set has no split {split!r}; it has {', '.join(map(repr, source))}")
        return source[split]
    if isinstance(source, Dataset | IterableDataset):
        return source
    if isinstance(source, str) and not source.strip():
        raise FileNotFoundError("the data set's name is empty: give a path, a glob or a hub id")
    if isinstance(source, str | os.PathLike):
        paths = _expand(os.fspath(source))
        if paths is None:
            return _load_named(os.fspath(source), split, name, streaming)
        return _load_files(paths, split, streaming)
    if isinstance(source, Sequence) and len(source) and all(isinstance(row, Mapping) for row in source):
        return _dataset_from_rows(enumerate(dict(row) for row in source))
    if isinstance(source, Sequence) and len(source) and all(isinstance(path, str | os.PathLike) for path in source):
        return _load_files([path for each in source for path in _expand_file(os.fspath(each))], split, streaming)
    if isinstance(source, Sequence) and not len(source):
        raise ValueError("the data set is an empty list; give at least one row or one path")
    raise TypeError(
        f"a data set must be a path, a hub id, a list of dicts or a datasets.Dataset, not {type(source).__name__}"
    )


def _expand(source: str) -> list[str] | None:
    """The files that a name stands for; None if it is a folder or can only be a hub id."""
    if os.path.isfile(source):
        return [source]
    if os.path.isdir(source):
        return None
    if glob.has_magic(source):
        paths = sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path))
        if not paths:
            raise FileNotFoundError(f"no file matches {source!r}")
        return paths
    looks_like_path = Path(source).suffix in SUFFIXES or source.startswith((".", "~", os.sep)) or source.count("/") > 1
    if looks_like_path:
        raise FileNotFoundError(f"no such file: {source!r}")
    return None


def _expand_file(source: str) -> list[str]:
    paths = _expand(source)
    if paths is None:
        raise FileNotFoundError(f"no such file: {source!r}")
    return paths


# Files


def _load_files(paths: list[str], split: str, streaming: bool) -> Dataset | IterableDataset:
    if split.split("[")[0] != "train":
        raise ValueError(f"{paths[0]} is a file, which has only the split 'train', not {split!r}")
    for path in paths:
        if Path(path).suffix not in SUFFIXES:
            raise ValueError(f"{path}: unknown kind of file; name it {', '.join(SUFFIXES)} after its content")
        if os.path.getsize(path) == 0:
            raise ValueError(f"{path} is empty")
    columnar = [Path(path).suffix == ".parquet" for path in paths]
    if any(columnar) and not all(columnar):
        raise ValueError(f"{paths[columnar.index(True)]}: Parquet files cannot be mixed with other files in one source")
    if all(columnar):
        return _load_parquet(paths, split, streaming)
    # The paths are a tuple, not a list: `datasets` would split a list over workers, and rows would lose their numbers.
    if streaming:
        if "[" in split:
            raise ValueError(f"split {split!r}: a stream has no known length; take a slice without streaming")
        stream = IterableDataset.from_generator(_stream_files, gen_kwargs={"paths": tuple(paths)})
        return _remember(stream, paths)
    dataset = _dataset_from_rows((n, row) for path in paths for n, row in read_rows(path))
    if not len(dataset):
        raise ValueError(f"{', '.join(paths)}: no rows")
    return _slice(dataset, split) if "[" in split else _remember(dataset, paths)


def _load_parquet(paths: list[str], split: str, streaming: bool) -> Dataset | IterableDataset:
    for path in paths:
        try:
            rows = pq.read_metadata(path).num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: not a readable Parquet file ({_first_line(error)})") from None
        if not rows:
            raise ValueError(f"{path}: no rows")
    try:
        with quiet_progress():
            dataset = datasets.load_dataset("parquet", data_files=list(paths), split=split, streaming=streaming)
    except Exception as error:
        # Whatever `datasets` wraps around it, the first line of the cause says what is wrong with the files.
        raise ValueError(f"{', '.join(paths)}: {_first_line(error.__cause__ or error)}") from error
    return dataset if "[" in split else _remember(dataset, paths)


def _slice(dataset: Dataset, split: str) -> Dataset:
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(dataset)})
    indices = [i for part in parts for i in range(part.from_, part.to)]
    if not indices:
        raise ValueError(f"split {split!r} of {len(dataset)} rows is empty")
    return dataset.select(indices)


def read_rows(path: str) -> Rows:
    """(number, row) for each row of a JSON, JSONL, CSV or TSV file; the number is the line where the row ends, or the
    element (from 1) of a JSON array. Raises ValueError naming file and line."""
    try:
        if Path(path).suffix in (".csv", ".tsv"):
            yield from _read_csv(path)
        elif Path(path).suffix == ".json" and _is_one_document(path):
            yield from _read_json_document(path)
        else:
            yield from _read_json_lines(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _is_one_document(path: str) -> bool:
    """Whether a .json file is an array or a single, indented object rather than one object per line."""
    with open(path, encoding="utf-8-sig") as file:
        first = next((line.strip() for line in file if line.strip()), "")
    if not first.startswith("{"):
        return True
    try:
        json.loads(first)
    except json.JSONDecodeError:
        return first == "{"
    return False


def _read_json_document(path: str) -> Rows:
    with open(path, encoding="utf-8-sig") as file:
        try:
            document = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
    for number, row in enumerate(document if isinstance(document, list) else [document], 1):
        yield number, _checked(row, f"{path}, element {number}", check_text=True)


def _read_json_lines(path: str) -> Rows:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from None
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from None
            yield number, _checked(row, where, check_text=b"\\ud" in line or b"\\uD" in line)


def _checked(row: Any, where: str, check_text: bool) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object with named columns, found {type(row).__name__}")
    if check_text:  # an escaped half of a surrogate pair is valid JSON, but no text that can be tokenised
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where}: a string holds half of a surrogate pair (\\ud800 to \\udfff)") from None
    return row


def _read_csv(path: str) -> Rows:
    csv.field_size_limit(sys.maxsize)  # the default of 131,072 characters is shorter than real documents
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header) or "" in header:
                raise ValueError(f"{path}, line 1: every column needs a name of its own, found {header}")
            for cells in reader:
                if len(cells) != len(header) and cells:
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells for {len(header)} columns; "
                        "quote cells that hold the delimiter"
                    )
                if cells:
                    yield reader.line_num, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from None


def _stream_files(paths: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for _, row in read_rows(path):
            yield row


# Names of rows in errors


@dataclass(frozen=True)
class Origin:
    """Names row `i` of a data set by file and line where it was read from files, else by its index."""

    paths: tuple[str, ...] = ()

    def __call__(self, row: int) -> str:
        index = row
        for path in self.paths:
            if Path(path).suffix == ".parquet":
                count = pq.read_metadata(path).num_rows
                if index < count:
                    return f"{path}, row {index} (the first is 0)"
                index -= count
                continue
            for number, _ in read_rows(path):
                if index == 0:
                    kind = "element" if path.endswith(".json") and _is_one_document(path) else "line"
                    return f"{path}, {kind} {number}"
                index -= 1
        return f"row {row} of the data set (the first is 0)"


def _remember(dataset: Any, paths: list[str]) -> Any:
    # On this object only: any transformation of a data set makes a new object, whose rows have other numbers.
    dataset._jaxtrl_origin = Origin(tuple(paths))
    return dataset


def origin_of(dataset: Dataset | IterableDataset) -> Origin:
    """How errors name the rows of this data set."""
    return getattr(dataset, "_jaxtrl_origin", Origin())


# Folders and hub ids


def _load_named(source: str, split: str, name: str | None, streaming: bool) -> Dataset | IterableDataset:
    folder = os.path.isdir(source)
    try:
        with quiet_progress():
            if folder and any(os.path.isfile(os.path.join(source, f)) for f in ("state.json", "dataset_dict.json")):
                return load_source(datasets.load_from_disk(source), split=split)
            return datasets.load_dataset(source, name, split=split, streaming=streaming)
    except Exception as error:
        # `datasets` raises many kinds here (not cached, offline, no such split, several configurations): all of them
        # mean that this name gives no rows, and their first line says why.
        what = "folder" if folder else "neither a file here nor a data set that can be loaded from the hub or its cache"
        raise ValueError(f"{source!r}: {what} ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def quiet_progress() -> Iterator[None]:
    """No progress bars of `datasets` unless someone watches a terminal."""
    hide = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()


# Rows to Arrow


def _dataset_from_rows(rows: Iterable[tuple[int, dict[str, Any]]]) -> Dataset:
    """A data set in memory. A column is the union over rows; a row that lacks it has None."""
    chunks: dict[str, list[pa.Array]] = {}
    total = 0
    rows = iter(rows)
    while chunk := [row for _, row in islice(rows, CHUNK_ROWS)]:
        for column in dict.fromkeys(key for row in chunk for key in row):
            arrays = chunks.setdefault(column, [pa.nulls(total)] if total else [])
            arrays.append(_to_array([row.get(column) for row in chunk], column))
        total += len(chunk)
        for arrays in chunks.values():
            missing = total - sum(map(len, arrays))
            if missing:
                arrays.append(pa.nulls(missing))
    return Dataset(pa.table({column: pa.chunked_array(_unify(arrays)) for column, arrays in chunks.items()}))


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value)
    )


def _to_array(values: list[Any], column: str) -> pa.Array:
    if not any(map(_is_nested, values)):
        try:
            array = pa.array(values)
            if array.type != pa.list_(pa.null()):  # empty lists only; pyarrow breaks when it casts this type
                return array
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            pass  # mixed types, or an integer beyond 64 bits: kept as JSON
    try:
        texts = [None if value is None else json.dumps(value) for value in values]
    except TypeError as error:
        raise ValueError(f"column {column!r}: a value cannot be stored ({error})") from None
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def _unify(arrays: list[pa.Array]) -> list[pa.Array]:
    """The chunks of one column in one type: theirs, float64 for integers and floats, else JSON."""
    types = {array.type for array in arrays} - {pa.null()}
    if not types:
        return arrays
    target = types.pop() if len(types) == 1 else pa.float64() if types == {pa.int64(), pa.float64()} else pa.json_()
    if target != pa.json_():
        try:
            return [array if array.type == target else array.cast(target) for array in arrays]
        except pa.ArrowInvalid:  # an integer that float64 would round
            target = pa.json_()
    return [array if array.type == target else _as_json(array) for array in arrays]


def _as_json(array: pa.Array) -> pa.Array:
    texts = [None if value is None else json.dumps(value) for value in array.to_pylist()]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))
