"""Files, folders, ids and lists as data sets; every fault is one sentence with file and line."""

import json

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrl.rows.formats import column_readers
from jaxtrl.rows.sources import CHUNK_ROWS, load_source, origin_of

ROWS = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(path, text, encoding="utf-8"):
    path.write_text(text, encoding=encoding)
    return str(path)


def write_lines(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def error_of(*args, **kwargs) -> str:
    with pytest.raises((ValueError, OSError, TypeError)) as info:
        load_source(*args, **kwargs)
    message = str(info.value)
    assert "\n" not in message
    return message


def test_every_kind_of_source_gives_the_same_rows(tmp_path):
    Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "dict")
    sources = [
        write_lines(tmp_path / "a.jsonl", ROWS),
        write(tmp_path / "array.json", json.dumps(ROWS, indent=1)),
        write_lines(tmp_path / "lines.json", ROWS),
        write_lines(tmp_path / "b.ndjson", ROWS),
        str(tmp_path / "a.parquet"),
        tmp_path / "a.parquet",
        str(tmp_path / "saved"),
        str(tmp_path / "dict"),
        ROWS,
        Dataset.from_list(ROWS),
        DatasetDict(train=Dataset.from_list(ROWS)),
    ]
    for source in sources:
        assert list(load_source(source)) == ROWS, source
    text_rows = [{"text": row["text"], "n": str(row["n"])} for row in ROWS]
    assert list(load_source(write(tmp_path / "a.csv", "text,n\na,1\nb,2\n"))) == text_rows
    assert list(load_source(write(tmp_path / "a.tsv", "text\tn\na\t1\nb\t2\n"))) == text_rows


def test_globs_and_lists_of_files_are_concatenated(tmp_path):
    first, second = write_lines(tmp_path / "x1.jsonl", ROWS[:1]), write_lines(tmp_path / "x2.jsonl", ROWS[1:])
    assert list(load_source(str(tmp_path / "x*.jsonl"))) == ROWS
    assert list(load_source([second, first])) == ROWS[::-1]
    assert list(load_source([str(tmp_path / "x*.jsonl"), first])) == [*ROWS, ROWS[0]]
    assert list(load_source(write_lines(tmp_path / "odd[1].jsonl", ROWS))) == ROWS  # a name, not a pattern


def test_streams_read_as_they_go(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps(ROWS[0]) + "\n{broken\n")
    stream = load_source(path, streaming=True)
    assert isinstance(stream, IterableDataset)
    rows = iter(stream)
    assert next(rows) == ROWS[0]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not valid JSON"):
        next(rows)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    assert list(load_source(str(tmp_path / "a.parquet"), streaming=True)) == ROWS


def test_slices_of_files(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"n": n} for n in range(10)])
    assert load_source(path, split="train[:3]")["n"][:] == [0, 1, 2]
    assert load_source(path, split="train[50%:]")["n"][:] == [5, 6, 7, 8, 9]
    assert "empty" in error_of(path, split="train[10:]")
    assert "only the split 'train'" in error_of(path, split="test")


def test_nested_values_come_back_exactly(tmp_path):
    """No key of another row, no None that nobody wrote, no rounded float, no reordering (Arrow structs do all that)."""
    rows = [
        {"m": [{"role": "user", "x": 0.1234567890123456}], "t": {"b": 1, "a": {"deep": None}}},
        {
            "m": [{"role": "assistant", "tool_calls": [{"z": 3.3333333333333335}]}, {"role": "tool"}],
            "t": {"c": [1, "2"]},
        },
        {"m": [], "t": None},
    ]
    back = datasets.Dataset.with_format(load_source(write_lines(tmp_path / "a.jsonl", rows)), "arrow")[:]
    for name in ("m", "t"):
        texts = back.column(name).to_pylist()
        assert [None if text is None else json.loads(text) for text in texts] == [row[name] for row in rows]
    assert list(load_source(rows)[1]["m"][0]) == ["role", "tool_calls"]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), JSON_VALUES, max_size=3), min_size=1, max_size=5))
def test_any_json_rows_are_stored_as_they_are(rows):
    """What the tokenizing step reads equals what was written, up to int against float of one number."""
    dataset = load_source(rows)
    readers = column_readers(dataset.features, keep_none=False, json_text=True)
    table = dataset.with_format("arrow")[:]
    for name in dataset.column_names:
        values = table.column(name).to_pylist()
        assert [readers.get(name, lambda value: value)(value) for value in values] == [row.get(name) for row in rows]


def test_mixed_columns_and_types(tmp_path):
    rows = [{"a": 1}, {"a": "x", "b": 2}, {"b": 2.5, "c": None}, {"a": 12345678901234567890}]
    dataset = load_source(write_lines(tmp_path / "a.jsonl", rows))
    assert [row["a"] for row in dataset] == [1, "x", None, 12345678901234567890]
    assert dataset["b"][:] == [None, 2.0, 2.5, None]
    assert dataset["c"][:] == [None] * 4
    # A string that looks like a number stays a string in a mixed column.
    assert load_source([{"a": "12"}, {"a": ["x", 1]}])[0] == {"a": "12"}


def test_types_that_change_after_the_first_chunk(tmp_path):
    rows = [{"a": i} for i in range(CHUNK_ROWS)] + [{"a": 0.5, "late": "y"}, {"late": ["z"]}]
    dataset = load_source(rows)
    assert len(dataset) == len(rows)
    assert dataset[CHUNK_ROWS - 1] == {"a": float(CHUNK_ROWS - 1), "late": None}
    assert dataset[CHUNK_ROWS] == {"a": 0.5, "late": "y"}
    assert dataset[CHUNK_ROWS + 1] == {"a": None, "late": ["z"]}
    rows = [{"a": 2**60 + 1}] * CHUNK_ROWS + [{"a": 0.5}]
    assert load_source(rows)[0] == {"a": 2**60 + 1}
    rows = [{"a": "1"}] * CHUNK_ROWS + [{"a": {"b": 1}}]
    assert load_source(rows)[0] == {"a": "1"}
    assert load_source(rows)[CHUNK_ROWS] == {"a": {"b": 1}}


def test_csv_keeps_text_as_it_is(tmp_path):
    path = write(tmp_path / "a.csv", '\ufefftext,n\n"line one\nline ""two"", more",007\n\n' + "x" * 200_000 + ",\n")
    assert list(load_source(path)) == [
        {"text": 'line one\nline "two", more', "n": "007"},
        {"text": "x" * 200_000, "n": ""},
    ]


def test_rows_are_named_by_file_and_line(tmp_path):
    first = write(tmp_path / "a.jsonl", '\n{"text": "a"}\n\n{"text": "b"}\n')
    second = write(tmp_path / "b.csv", 'text\n"one\ntwo"\nthree\n')
    third = write(tmp_path / "c.json", json.dumps(ROWS, indent=1))
    dataset = load_source([first, second, third])
    names = [origin_of(dataset)(i) for i in range(len(dataset))]
    assert names == [
        f"{first}, line 2",
        f"{first}, line 4",
        f"{second}, line 3",
        f"{second}, line 4",
        f"{third}, element 1",
        f"{third}, element 2",
    ]
    Dataset.from_list(ROWS).to_parquet(tmp_path / "d.parquet")
    assert origin_of(load_source(str(tmp_path / "d.parquet")))(1) == f"{tmp_path / 'd.parquet'}, row 1 (the first is 0)"
    # After a shuffle rows have other numbers, so no line is claimed.
    assert origin_of(dataset.shuffle(seed=0))(1) == "row 1 of the data set (the first is 0)"
    assert origin_of(load_source(ROWS))(0) == "row 0 of the data set (the first is 0)"


def test_faults_are_one_sentence(tmp_path):
    assert "no such file" in error_of(str(tmp_path / "missing.jsonl"))
    assert "no such file" in error_of("./missing")
    assert "no file matches" in error_of(str(tmp_path / "*.jsonl"))
    assert "no such file" in error_of([str(tmp_path / "missing.jsonl")])
    assert "is empty" in error_of(write(tmp_path / "empty.jsonl", ""))
    assert "no rows" in error_of(write(tmp_path / "blank.jsonl", "\n \n"))
    assert "no rows" in error_of(write(tmp_path / "head.csv", "text,n\n"))
    assert "no rows" in error_of(write(tmp_path / "none.json", "[]"))
    assert "unknown kind of file" in error_of(write(tmp_path / "a.txt", "x"))
    broken = error_of(write(tmp_path / "b.jsonl", '{"text": "a"}\n{"text": \n{"text": "c"}\n'))
    assert "b.jsonl, line 2: not valid JSON" in broken
    assert "c.json, line 3: not valid JSON" in error_of(write(tmp_path / "c.json", '[\n{"a": 1},\n{"a": }\n]'))
    assert "d.jsonl, line 1: expected a JSON object" in error_of(write(tmp_path / "d.jsonl", "[1]\n"))
    assert "e.json, element 2: expected a JSON object" in error_of(write(tmp_path / "e.json", '[{"a": 1}, 3]'))
    assert "f.jsonl, line 1: not UTF-8" in error_of(write(tmp_path / "f.jsonl", '{"a": "\xe9"}', "latin-1"))
    assert "f.csv: not UTF-8" in error_of(write(tmp_path / "f.csv", "a\n\xe9\n", "latin-1"))
    assert "g.jsonl, line 1" in error_of(write(tmp_path / "g.jsonl", '{"a": "\\ud800"}'))
    assert "h.csv, line 3: 3 cells for 2 columns" in error_of(write(tmp_path / "h.csv", "a,b\n1,2\n1,2,3\n"))
    assert "i.csv, line 1: every column needs a name" in error_of(write(tmp_path / "i.csv", "a,a\n1,2\n"))
    assert "j.csv, line 2: not valid CSV" in error_of(write(tmp_path / "j.csv", 'a,b\n"1"x,2\n'))
    assert "k.parquet: not a readable Parquet file" in error_of(write(tmp_path / "k.parquet", "PAR1 nonsense"))
    assert "empty list" in error_of([])
    assert "not int" in error_of(3)
    assert "cannot be stored" in error_of([{"a": {"b": object()}}])
    assert "trust_remote_code" in error_of(ROWS, trust_remote_code=True)
    assert "no split 'test'" in error_of(DatasetDict(train=Dataset.from_list(ROWS)), split="test")
    mixed = [write_lines(tmp_path / "l.jsonl", ROWS), str(tmp_path / "k.parquet")]
    assert "cannot be mixed" in error_of(mixed)
    assert "no known length" in error_of(mixed[0], split="train[:1]", streaming=True)


def test_unknown_id_and_missing_split_of_a_folder(tmp_path):
    assert "neither a file here nor a data set" in error_of("nobody/no-such-data")
    DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "dict")
    assert "'test'" in error_of(str(tmp_path / "dict"), split="test")


def test_progress_bars_stay_as_they_were(tmp_path):
    Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    before = datasets.are_progress_bars_disabled()
    load_source(str(tmp_path / "a.parquet"))
    assert datasets.are_progress_bars_disabled() == before
