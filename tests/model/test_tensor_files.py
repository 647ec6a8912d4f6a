"""Safetensors files: what is written is what the safetensors package reads, and each fault is one clear error."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxtrl.model.tensor_files import TensorSpec, open_tensors, parse_size, plan_shards, read_header, write_tensors

BF16 = np.dtype(ml_dtypes.bfloat16)
ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.arange(8, dtype=BF16).reshape(4, 2),
    "d": np.array(3.5, np.float32),
}


def write(folder, arrays=ARRAYS, max_shard_size="50GB"):
    specs = [TensorSpec(name, x.shape, x.dtype) for name, x in arrays.items()]
    write_tensors(folder, specs, arrays.items(), max_shard_size)
    return sorted(p.name for p in folder.iterdir())


def header_of(path):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put(path, header, data):
    content = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)


@pytest.mark.parametrize("size", ["50GB", 30, 1])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, size):
    files = write(tmp_path, max_shard_size=size)
    found = open_tensors(tmp_path)
    assert list(found) == list(ARRAYS)
    for name, x in ARRAYS.items():
        y = np.asarray(found[name])
        assert (y.dtype, y.shape, y.tobytes()) == (x.dtype, x.shape, x.tobytes())
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
    assert len(files) == {"50GB": 1, 30: 3, 1: 5}[size]  # shards and the index


def test_the_safetensors_package_reads_what_is_written_and_the_reverse(tmp_path):
    arrays = {name: x for name, x in ARRAYS.items() if x.dtype != BF16}
    write(tmp_path, arrays)
    found = load_file(tmp_path / "model.safetensors")
    assert {name: x.tobytes() for name, x in found.items()} == {name: x.tobytes() for name, x in arrays.items()}
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    save_file(arrays, tmp_path / "theirs.safetensors")
    ours = read_header(tmp_path / "theirs.safetensors")
    assert {name: np.asarray(x).tobytes() for name, x in ours.items()} == {n: x.tobytes() for n, x in arrays.items()}


def test_the_data_is_aligned_and_starts_after_the_header(tmp_path):
    write(tmp_path)
    assert int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") % 8 == 0


def test_shards_are_filled_in_order_and_a_large_tensor_has_its_own():
    specs = [TensorSpec(f"t{i}", (size,), BF16) for i, size in enumerate([3, 2, 9, 1, 1])]
    assert [[s.name for s in shard] for shard in plan_shards(specs, 10)] == [["t0", "t1"], ["t2"], ["t3", "t4"]]


def test_the_index_is_transformers(tmp_path):
    files = write(tmp_path, max_shard_size=30)
    assert files[0] == "model-00001-of-00002.safetensors" or files[0] == "model-00001-of-00003.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 19, "total_size": sum(x.nbytes for x in ARRAYS.values())}
    assert set(index["weight_map"]) == set(ARRAYS)


def test_files_of_an_earlier_save_are_removed(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    write(tmp_path, max_shard_size=1)
    assert write(tmp_path) == ["model.safetensors", "tokenizer.json"]
    write(tmp_path, max_shard_size=1)
    files = write(tmp_path, max_shard_size=30)
    assert len([name for name in files if name.endswith(".safetensors")]) == len(
        set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())
    )


def test_a_failed_write_leaves_the_earlier_files(tmp_path):
    write(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    wrong = TensorSpec("a", (7,), np.dtype(np.float32))
    with pytest.raises(ValueError, match=r"expected TensorSpec\(name='a', shape=\(7,\)"):
        write_tensors(tmp_path, [wrong], [("a", ARRAYS["a"])], "50GB")
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "size"), [(7, 7), ("7B", 7), ("2KB", 2000), ("3 mb", 3 * 10**6), ("50GB", 5 * 10**10)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", [0, -1, "", "GB", "1.5GB", "0MB", "5GiB"])
def test_bad_sizes_are_refused(text):
    with pytest.raises(ValueError, match="max_shard_size must be a positive number of bytes or look like '5GB'"):
        parse_size(text)


def change(entry: dict, **fields):
    return {**entry, **fields}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda h, d: (h, d[:-1]), "model.safetensors is truncated: it has .* bytes, copy it again"),
        (lambda h, d: (h, b""), "model.safetensors is truncated"),
        (lambda h, d: (h, d + b"x"), "model.safetensors is corrupt: 1 bytes follow its last tensor"),
        (lambda h, d: (json.dumps(h)[:-2], d), "the header of .*model.safetensors is corrupt: it is not valid JSON"),
        (lambda h, d: ("[]", d), "the header of .* must be a JSON object"),
        (lambda h, d: ('{"a": 1, "a": 2}', d), "tensor or key a is duplicate in the header of .*model.safetensors"),
        (lambda h, d: ({**h, "a": 3}, d), "the entry of tensor a is 3"),
        (lambda h, d: ({**h, "a": change(h["a"], shape=[-2, -3])}, d), "the entry of tensor a is"),
        (lambda h, d: ({**h, "a": change(h["a"], data_offsets=[0])}, d), "the entry of tensor a is"),
        (
            lambda h, d: ({**h, "a": change(h["a"], dtype="I8")}, d),
            "tensor a in .*model.safetensors has dtype I8: only F32",
        ),
        (lambda h, d: ({**h, "a": change(h["a"], dtype="F8_E4M3")}, d), "tensor a in .* has dtype F8_E4M3"),
        (lambda h, d: ({**h, "a": change(h["a"], shape=[2, 4])}, d), r"tensor a of shape \[2, 4\] has 24 bytes"),
        (lambda h, d: ({**h, "b": change(h["b"], data_offsets=[20, 28])}, d), "tensor b starts at 20 instead of 24"),
        (lambda h, d: ({k: v for k, v in h.items() if k != "b"}, d), "tensor c starts at 32 instead of 24"),
    ],
)
def test_a_damaged_file_is_one_clear_error(tmp_path, damage, message):
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    put(path, *damage(*header_of(path)))
    with pytest.raises(ValueError, match=message):
        open_tensors(tmp_path)


def test_other_files_in_the_place_of_the_weights(tmp_path):
    path = tmp_path / "model.safetensors"
    for content, message in (
        (b"", "is truncated or no safetensors file: its 0 bytes"),
        (b"abc", "its 3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a Git LFS pointer"),
        (b"\xff" * 64, "is truncated or no safetensors file: its 64 bytes"),
        (b"PK\x03\x04" * 100, "is truncated or no safetensors file"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_tensors(tmp_path)


def test_a_file_cut_after_it_was_opened(tmp_path):
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = open_tensors(tmp_path)
    path.write_bytes(path.read_bytes()[:-6])
    np.asarray(tensors["a"])
    with pytest.raises(ValueError, match=r"model.safetensors ends inside tensor c: the file is truncated"):
        np.asarray(tensors["c"])


def test_missing_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no weights: neither model.safetensors nor"):
        open_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        FileNotFoundError, match=r"has pytorch_model.bin but no model.safetensors: only safetensors is read"
    ):
        open_tensors(tmp_path)


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_faults_of_sharded_checkpoints(tmp_path):
    def fresh(name):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, max_shard_size=1)
        return folder

    first = "model-00001-of-00004.safetensors"
    folder = fresh("missing shard")
    (folder / first).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"{first} is missing: model.safetensors.index.json says that it holds a"
    ):
        open_tensors(folder)

    folder = fresh("truncated shard")
    (folder / first).write_bytes((folder / first).read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{first} is truncated"):
        open_tensors(folder)

    folder = fresh("duplicate")
    save_file({"a": ARRAYS["a"], "b": ARRAYS["b"]}, folder / first)
    with pytest.raises(ValueError, match=f"tensor b is duplicate: it is in {first} and in model-00002-of-00004"):
        open_tensors(folder)

    folder = fresh("unlisted")
    save_file({"a": ARRAYS["a"], "z": ARRAYS["b"]}, folder / first)
    with pytest.raises(ValueError, match=f"{first} has tensor z, which model.safetensors.index.json does not list"):
        open_tensors(folder)

    folder = fresh("not there")
    edit_index(folder, lambda weight_map: weight_map.update(z=first))
    with pytest.raises(ValueError, match=f"tensor z is missing in .*{first}"):
        open_tensors(folder)

    folder = fresh("elsewhere")
    edit_index(folder, lambda weight_map: weight_map.update(a="model-00002-of-00004.safetensors", b=first))
    with pytest.raises(ValueError, match=r"tensor [ab] is in .*, but model.safetensors.index.json says model-0000"):
        open_tensors(folder)

    folder = fresh("outside")
    edit_index(folder, lambda weight_map: weight_map.update(a="../other.safetensors"))
    with pytest.raises(
        ValueError, match=r"sends tensor a to '../other.safetensors': it must be a .safetensors file of"
    ):
        open_tensors(folder)

    folder = fresh("two forms")
    write_single = {"a": ARRAYS["a"]}
    save_file(write_single, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"has both model.safetensors and model.safetensors.index.json: remove the one"
    ):
        open_tensors(folder)

    folder = fresh("no map")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        open_tensors(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(ValueError, match=r"tensor or key a is duplicate in .*index.json"):
        open_tensors(folder)
