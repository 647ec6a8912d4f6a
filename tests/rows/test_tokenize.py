"""Token ids, loss masks and the account of rows: cases C02, C04 to C08 and C28, and TRL itself on real data."""

import json
import pickle
import re
from importlib.resources import files
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer

from jaxtrl.rows.encode import common_prefix_length
from jaxtrl.rows.sources import load_source
from jaxtrl.rows.tokenize import TokenizeOptions, check_ids, show_example, tokenize_dataset
from tests.rows.test_chat import PLAIN_CHATML, THINKS_LAST

M1 = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
M1_IDS = [151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271, 9707, 0, 151645, 198]
TWO_TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nadd again\n</think>\n\n4"},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny():
    """The bundled tokenizer: ChatML tokens, 768 ids."""
    return AutoTokenizer.from_pretrained(str(files("jaxtrl") / "assets" / "tokenizer"))


def tokenize(tokenizer, source, formatting_func=None, num_proc=None, **options):
    options = TokenizeOptions(**options)
    return tokenize_dataset(load_source(source), tokenizer, options, formatting_func=formatting_func, num_proc=num_proc)


def error_of(tokenizer, source, **options) -> str:
    with pytest.raises(ValueError, match=r".") as info:
        tokenize(tokenizer, source, **options)
    assert "\n" not in str(info.value)
    return str(info.value)


def trained(row):
    return [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]


# Cases with the Qwen3 tokenizer


def test_c02_eos_exactly_once_and_trained(qwen3_tokenizer):
    for completion in (" Paris.", " Paris.<|im_end|>"):
        rows, report = tokenize(qwen3_tokenizer, [{"prompt": "The capital of France is", "completion": completion}])
        assert rows[0]["input_ids"] == [785, 6722, 315, 9625, 374, 12095, 13, 151645]
        assert trained(rows[0]) == [12095, 13, 151645]
        assert report.trained_tokens == 3
    for text in ("Paris.", "Paris.<|im_end|>"):
        rows, _ = tokenize(qwen3_tokenizer, [{"text": text}])
        assert rows[0] == {"input_ids": [59604, 13, 151645], "loss_mask": [False, True, True]}


def test_c04_assistant_only_trains_the_assistant(qwen3_tokenizer):
    rows, report = tokenize(qwen3_tokenizer, [{"messages": M1}], assistant_only_loss=True)
    assert rows[0]["input_ids"] == M1_IDS
    assert trained(rows[0]) == [151667, 271, 151668, 271, 9707, 0, 151645, 198]
    assert report.template == "Qwen3 training template"


def test_c05_reasoning_of_earlier_turns(qwen3_tokenizer):
    rows, report = tokenize(qwen3_tokenizer, [{"messages": TWO_TURNS}], assistant_only_loss=True)
    assert len(rows[0]["input_ids"]) == 43
    assert len(trained(rows[0])) == 19
    assert trained(rows[0]).count(151645) == 2
    assert report.lost_reasoning == 0
    begin, _ = tokenize(qwen3_tokenizer, [{"messages": TWO_TURNS[:2]}], prefix_preserving=True)
    assert rows[0]["input_ids"][: len(begin[0]["input_ids"])] == begin[0]["input_ids"]
    # The stock template drops the first turn's reasoning, as it does in TRL. It is counted.
    rows, report = tokenize(qwen3_tokenizer, [{"messages": TWO_TURNS}])
    assert (len(rows[0]["input_ids"]), report.lost_reasoning) == (37, 1)
    orphan = [M1[0], {"role": "assistant", "content": "It is 4.\n</think>\n\n4"}]
    rows, _ = tokenize(qwen3_tokenizer, [{"messages": orphan}], assistant_only_loss=True)
    assert qwen3_tokenizer.decode(trained(rows[0])) == "<think>\nIt is 4.\n</think>\n\n4<|im_end|>\n"


def test_c06_truncation_that_leaves_nothing(qwen3_tokenizer):
    row = {"prompt": "one two three four five six seven eight", "completion": " ok"}
    assert trained(tokenize(qwen3_tokenizer, [row], max_length=9)[0][0]) == [5394]
    assert trained(tokenize(qwen3_tokenizer, [row], max_length=10)[0][0]) == [5394, 151645]
    message = error_of(qwen3_tokenizer, [row], max_length=8)
    assert message == (
        "nothing to train on: all 1 rows were dropped (1: no trained token within max_length); raise max_length=8"
    )
    rows, report = tokenize(qwen3_tokenizer, [row, {"prompt": "a", "completion": " b"}], max_length=8)
    assert len(rows) == 1
    assert report.dropped == {"no trained token within max_length": 1}
    assert (report.rows, report.kept, report.truncated) == (2, 1, 0)


def test_c07_mixed_columns(qwen3_tokenizer, tmp_path):
    with_null = [M1[0], {**M1[1], "tool_calls": None}]
    lines = [{"messages": M1}, {"messages": M1, "id": 7}, {"messages": with_null}, {"text": "x"}]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, lines[:3])))
    for streaming in (False, True):
        rows, _ = tokenize_dataset(load_source(path, streaming=streaming), qwen3_tokenizer, TokenizeOptions())
        assert [row["input_ids"] for row in rows] == [M1_IDS] * 3
    path.write_text("\n".join(map(json.dumps, lines)))
    assert error_of(qwen3_tokenizer, path) == f"{path}, line 4: no `messages` (missing or null)"
    stream, _ = tokenize_dataset(load_source(path, streaming=True), qwen3_tokenizer, TokenizeOptions())
    with pytest.raises(ValueError, match=r"mixed\.jsonl, line 4: no `messages`"):
        list(stream)
    # The same rows in Arrow structs, where every message has every key.
    rows, _ = tokenize(qwen3_tokenizer, Dataset.from_list([{"messages": M1}, {"messages": with_null}]))
    assert [row["input_ids"] for row in rows] == [M1_IDS] * 2


@pytest.mark.parametrize("ids", [[383, 75, 385], [16, 488, 198, 198, 17]])
def test_c28_given_ids_are_never_decoded(qwen3_tokenizer, ids):
    again = qwen3_tokenizer(qwen3_tokenizer.decode(ids))["input_ids"]
    assert again != ids  # the round trip is not the identity
    rows, _ = tokenize(qwen3_tokenizer, [{"input_ids": ids, "labels": [-100, *ids[1:]]}])
    assert rows[0] == {"input_ids": ids, "loss_mask": [False] + [True] * (len(ids) - 1)}


# The same kinds of fault with the bundled tokenizer, and everything else


def test_c08_id_outside_the_vocabulary(tiny, tmp_path):
    rows = [{"input_ids": [5, 9]}, {"input_ids": [5, 64, 3]}]
    path = tmp_path / "ids.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tokenized, _ = tokenize(tiny, rows, vocab_size=65)
    check_ids(tokenized, 65)
    with pytest.raises(ValueError, match=r"row 1 .*: token id 64 at position 1, but the embedding has 64 rows"):
        check_ids(tokenized, 64)
    assert f"{path}, line 2: token id 64 at position 1" in error_of(tiny, path, vocab_size=64)
    with pytest.raises(ValueError, match=r"row 0 .*negative token id -3 at position 1"):
        check_ids(Dataset.from_dict({"input_ids": [[1, -3]]}), 64)
    with pytest.raises(ValueError, match=r"row 1 .*token id 64"):  # through a selection of rows
        check_ids(Dataset.from_list(rows).select([0, 1]), 64)
    check_ids(Dataset.from_dict({"input_ids": [[], [3]]}), 64)


def test_every_format_of_a_plain_row(tiny):
    whole = tiny("Q: 1 A: 2<|im_end|>")["input_ids"]
    sources = {
        "text": ([{"text": "Q: 1 A: 2"}], {}),
        "body": ([{"body": "Q: 1 A: 2"}], {"dataset_text_field": "body"}),
        "pair": ([{"prompt": "Q: 1 A:", "completion": " 2"}], {"completion_only_loss": False}),
        "function": ([{"q": 1, "a": 2}], {"formatting_func": lambda row: f"Q: {row['q']} A: {row['a']}"}),
        "ids": ([{"input_ids": whole}], {}),
    }
    for name, (rows, options) in sources.items():
        tokenized, report = tokenize(tiny, rows, **options)
        assert tokenized[0] == {"input_ids": whole, "loss_mask": [False] + [True] * (len(whole) - 1)}, name
        assert (report.tokens, report.trained_tokens, report.longest) == (len(whole), len(whole) - 1, len(whole))
        assert report.without_eos == 0
    answer, _ = tokenize(tiny, sources["pair"][0])
    assert answer[0]["input_ids"] == whole
    assert tiny.decode(trained(answer[0])) == " 2<|im_end|>"


def test_formatting_function_sees_the_row_and_replaces_its_columns(tiny):
    rows = [{"prompt": [{"role": "user", "content": "Q", "x": None}], "completion": "c", "text": "no", "f": 0.1}]
    seen = []

    def function(row):
        seen.append(row)
        return row["prompt"][0]["content"] + str(row["f"])

    tokenized, _ = tokenize(tiny, rows, formatting_func=function)
    assert tokenized[0]["input_ids"] == tiny("Q0.1<|im_end|>")["input_ids"]
    assert seen == rows
    assert "must return one string, not list" in error_of(tiny, rows, formatting_func=lambda row: [row["completion"]])
    assert "completion_only_loss needs" in error_of(tiny, rows, formatting_func=function, completion_only_loss=True)
    assert "has `input_ids` already" in error_of(tiny, [{"input_ids": [1, 2]}], formatting_func=function)


def test_every_format_of_a_conversation(tiny):
    conversation, _ = tokenize(tiny, [{"messages": M1}])
    sharegpt = [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}]
    pair = [{"prompt": M1[:1], "completion": M1[1:]}]
    texts = [{"messages": json.dumps(M1)}]
    for source in (sharegpt, pair, texts):
        assert tokenize(tiny, source)[0][0]["input_ids"] == conversation[0]["input_ids"]
    for source, options in (
        (pair, {}),
        (pair, {"assistant_only_loss": True}),
        (sharegpt, {"assistant_only_loss": True}),
    ):
        assert tiny.decode(trained(tokenize(tiny, source, **options)[0][0])) == "Hello!<|im_end|>\n"
    everything = tokenize(tiny, pair, completion_only_loss=False)[0][0]
    assert everything == conversation[0]
    assert sum(everything["loss_mask"]) == len(everything["input_ids"]) - 1


def test_assistant_only_inside_a_completion(tiny):
    """Both masks apply: not the answer in the prompt, not the user's message in the completion."""
    row = {"prompt": M1, "completion": [{"role": "user", "content": "More"}, {"role": "assistant", "content": "Bye"}]}
    rows, report = tokenize(tiny, [row])
    # As in TRL the completion begins where it parts from the generation prompt, here after <|im_start|>.
    assert tiny.decode(trained(rows[0])).startswith("user\nMore<|im_end|>\n<|im_start|>assistant\nBye")
    assert report.diverged == 1
    assert tiny.decode(trained(tokenize(tiny, [row], assistant_only_loss=True)[0][0])) == "Bye<|im_end|>\n"
    both = tokenize(tiny, [row], assistant_only_loss=True, completion_only_loss=False)[0][0]
    assert tiny.decode(trained(both)) == "Hello!<|im_end|>\nBye<|im_end|>\n"


def test_template_kwargs_of_options_and_of_rows(tiny):
    tiny.chat_template = "{{ greeting }}{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"messages": M1}, {"messages": M1, "chat_template_kwargs": {"greeting": "row "}}]
    tokenized, _ = tokenize(tiny, rows, chat_template_kwargs={"greeting": "option "})
    assert [tiny.decode(row["input_ids"]) for row in tokenized] == ["option HiHello!", "row HiHello!"]


def test_tools_reach_the_template_as_written(tiny):
    """In files and lists exactly; in Arrow structs without the keys of other rows' tools."""
    tiny.chat_template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = [[{"p": {"b": 0.1234567890123456, "a": None}}], [{"p": {"c": [1]}}]]
    rows = [{"messages": M1, "tools": each} for each in tools]
    expected = [json.dumps(each) + "HiHello!" for each in tools]
    as_texts = [{"messages": M1, "tools": json.dumps(each)} for each in tools]
    for source in (rows, as_texts):
        assert [tiny.decode(row["input_ids"]) for row in tokenize(tiny, source)[0]] == expected
    short = [{"p": {key: value for key, value in each[0]["p"].items() if value}} for each in tools]
    struct = Dataset.from_list([{"messages": M1, "tools": [tool]} for tool in short])
    assert isinstance(struct.features["tools"].feature, dict)
    expected[0] = '[{"p": {"b": 0.1234567890123456}}]HiHello!'
    assert [tiny.decode(row["input_ids"]) for row in tokenize(tiny, struct)[0]] == expected


def test_prompt_that_the_template_rewrites(tiny):
    """Only the generation prompt differs: trained from where they part. The messages differ: the row is dropped."""
    tiny.chat_template = PLAIN_CHATML.replace("assistant\n' }}", "assistant\n<think>' }}")
    rows, report = tokenize(tiny, [{"prompt": M1[:1], "completion": M1[1:]}])
    assert tiny.decode(trained(rows[0])) == "Hello!<|im_end|>\n"
    assert (report.diverged, report.dropped) == (1, {})
    tiny.chat_template = THINKS_LAST
    bad = {"prompt": M1, "completion": TWO_TURNS[2:]}
    good = {"prompt": M1[:1], "completion": M1[1:]}
    rows, report = tokenize(tiny, [bad, good, bad])
    assert len(rows) == 1
    assert tiny.decode(trained(rows[0])) == "<think>\n\n</think>\n\nHello!<|im_end|>\n"
    reason = "the chat template rewrites the prompt once the completion follows"
    assert report.dropped == {reason: 2}
    assert reason in error_of(tiny, [bad])


def test_plain_prompt_whose_end_merges_with_the_completion(tiny):
    # Of most tokens the last letter alone is another id; of some (the beginning of a longer token) it merges further.
    pairs = [("x " + token[:-1], token[-1]) for token in sorted(tiny.get_vocab()) if token.isalpha() and len(token) > 2]
    split, joined = (tiny([text.format(*pair) for pair in pairs])["input_ids"] for text in ("{}", "{}{}<|im_end|>"))
    prompt, end = next(
        pair for pair, a, b in zip(pairs, split, joined, strict=True) if common_prefix_length(a, b) < len(a)
    )
    rows, report = tokenize(tiny, [{"prompt": prompt, "completion": end}])
    whole = tiny(f"{prompt}{end}<|im_end|>")["input_ids"]
    assert rows[0]["input_ids"] == whole
    assert trained(rows[0]) == whole[common_prefix_length(tiny(prompt)["input_ids"], whole) :]
    assert report.diverged == 1


def test_common_prefix():
    cases = [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([1, 5], [1, 2, 3], 1), ([], [], 0)]
    for first, second, length in cases:
        assert common_prefix_length(first, second) == length


def test_truncation_from_both_ends(tiny):
    rows = [{"input_ids": list(range(2, 12))}, {"input_ids": [3, 4]}]
    start, report = tokenize(tiny, rows, max_length=4)
    assert start[0] == {"input_ids": [2, 3, 4, 5], "loss_mask": [False, True, True, True]}
    assert (report.truncated, report.tokens, report.trained_tokens, report.longest) == (1, 6, 4, 4)
    end, _ = tokenize(tiny, rows, max_length=4, truncation_mode="keep_end")
    assert end[0] == {"input_ids": [8, 9, 10, 11], "loss_mask": [False, True, True, True]}
    assert len(tokenize(tiny, rows, max_length=None)[0][0]["input_ids"]) == 10
    with pytest.raises(ValueError, match="keep_start"):
        TokenizeOptions(truncation_mode="middle")
    with pytest.raises(ValueError, match="at least 2"):
        TokenizeOptions(max_length=1)


def test_every_dropped_row_is_counted(tiny):
    rows = [
        {"messages": M1},
        {"messages": []},
        {"messages": M1[:1]},
        {"messages": [{"role": "user", "content": "long " * 50}, M1[1]]},
    ]
    tokenized, report = tokenize(tiny, rows, assistant_only_loss=True, max_length=60)
    assert len(tokenized) == report.kept == 1
    assert report.dropped == {"no messages": 1, "no assistant message": 1, "no trained token within max_length": 1}
    assert report.rows == 4
    assert "4 rows read, 3 dropped (1: no assistant message, 1: no messages, 1: no trained" in report.summary()
    _, report = tokenize(tiny, [{"input_ids": [4]}, {"input_ids": [4, 5]}, {"input_ids": [4, 5], "labels": [4, -100]}])
    assert report.dropped == {"no trained token": 2}  # a first token is never predicted


def test_a_template_that_marks_nothing_is_an_error(tiny):
    tiny.chat_template = PLAIN_CHATML + "{% generation %}{% endgeneration %}"
    message = error_of(tiny, [{"messages": M1}], assistant_only_loss=True)
    assert message.startswith("row 0 of the data set (the first is 0): the chat template marks no token")


def test_rows_without_a_trained_eos_are_counted(tiny):
    tiny.chat_template = PLAIN_CHATML.replace("<|im_end|>", "<|endoftext|>")
    _, report = tokenize(tiny, [{"messages": M1}])
    assert report.without_eos == 1
    assert "1 rows without a trained EOS" in report.summary()


def test_eos_option_and_tokenizers_that_add_eos_themselves(tiny):
    rows, report = tokenize(tiny, [{"text": "ab"}], eos_token="<|endoftext|>")
    assert rows[0]["input_ids"][-1] == tiny.pad_token_id
    assert report.without_eos == 0
    assert "not in the tokenizer's vocabulary" in error_of(tiny, [{"text": "ab"}], eos_token="<nope>")
    whole = tiny("ab c<|im_end|>")["input_ids"]

    from tokenizers.processors import TemplateProcessing

    tiny.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", tiny.eos_token_id)]
    )
    assert tiny("ab")["input_ids"][-1] == tiny.eos_token_id
    for source in ([{"text": "ab c"}], [{"text": "ab c<|im_end|>"}], [{"prompt": "ab", "completion": " c"}]):
        rows, report = tokenize(tiny, source)
        assert rows[0]["input_ids"] == whole
        assert report.diverged == 0
    tiny.eos_token = None
    assert "has no EOS token" in error_of(tiny, [{"text": "ab"}])


def test_options_that_do_not_fit_the_format(tiny):
    assert "assistant_only_loss needs conversations" in error_of(tiny, [{"text": "a"}], assistant_only_loss=True)
    assert "format is messages" in error_of(tiny, [{"messages": M1}], completion_only_loss=True)
    masked = [{"input_ids": [4, 5, 6], "completion_mask": [0, 0, 1]}]
    assert "set completion_only_loss to true" in error_of(tiny, masked)
    assert trained(tokenize(tiny, masked, completion_only_loss=True)[0][0]) == [6]
    assert trained(tokenize(tiny, masked, completion_only_loss=False)[0][0]) == [5, 6]
    tiny.chat_template = None
    assert "tokenizer has no chat template" in error_of(tiny, [{"messages": M1}])
    assert "no column to train on" in error_of(tiny, [{"a": "b"}])
    assert "no rows" in error_of(tiny, Dataset.from_dict({"text": []}))
    transformed = Dataset.from_list([{"text": "a"}]).with_transform(lambda rows: rows)
    assert "with_transform" in error_of(tiny, transformed)


def test_a_row_of_another_kind_is_named(tiny):
    rows = [{"prompt": "a", "completion": " b"}, {"prompt": M1[:1], "completion": M1[1:]}]
    assert "row 1 of the data set (the first is 0): a conversation in a data set" in error_of(tiny, rows)
    assert "a text in a data set whose first row is a conversation" in error_of(tiny, rows[::-1])
    human = [{"messages": M1}, {"messages": [{"role": "human", "content": "Hi"}, M1[1]]}]
    assert tokenize(tiny, human)[0][0] == tokenize(tiny, human)[0][1]
    tiny.chat_template = PLAIN_CHATML.replace("for m in messages", "for m in messages if m.role != 'critic'")
    critic = [{"messages": M1}, {"messages": [*M1, {"role": "critic", "content": "Bad"}]}]
    assert re.search(r"row 1 .*message 2 .role 'critic'. is left out", error_of(tiny, critic))


def test_lists_formats_and_shuffles_of_data_sets(tiny):
    source = Dataset.from_dict({"text": ["a b", "c", "d e f"]})
    expected = [row["input_ids"] for row in tokenize(tiny, source)[0]]
    assert [row["input_ids"] for row in tokenize(tiny, source.with_format("numpy"))[0]] == expected
    assert [row["input_ids"] for row in tokenize(tiny, source.select([2, 0]))[0]] == [expected[2], expected[0]]
    assert tokenize(tiny, source)[0].column_names == ["input_ids", "loss_mask"]


def test_workers_give_the_same_rows(tiny):
    source = [{"messages": [M1[0], {"role": "assistant", "content": "word " * (i + 1)}]} for i in range(7)]
    source.append({"messages": []})
    rows, report = tokenize(tiny, source, assistant_only_loss=True)
    again, report_again = tokenize(tiny, source, assistant_only_loss=True, num_proc=2)
    assert list(rows) == list(again)
    assert report == report_again
    with pytest.raises(ValueError, match=r"row 7 of the data set .*no `messages`"):
        tokenize(tiny, [*source[:7], {"messages": None}], num_proc=2)


def test_cache_of_file_data_sets(tiny, tmp_path, monkeypatch):
    """Data sets in files are tokenised once; another option, template or function is another result."""
    from jaxtrl.rows import encode

    Dataset.from_list([{"text": "a b c"}]).save_to_disk(tmp_path / "saved")
    calls = []
    table = encode.Encoder.table
    monkeypatch.setattr(encode.Encoder, "table", lambda *args: calls.append(1) or table(*args))

    def run(**options):
        before = len(calls)
        rows, report = tokenize(tiny, str(tmp_path / "saved"), **options)
        return rows[0], report, len(calls) - before

    first = run()
    assert first[2] == 1
    assert run() == (*first[:2], 0)
    assert run(eos_token="<|endoftext|>")[2] == 1
    assert run(formatting_func=lambda row: row["text"] + "!")[2] == 1
    assert run(formatting_func=lambda row: row["text"] + "!")[2] == 0
    assert run(formatting_func=lambda row: row["text"] + "?")[2] == 1
    tiny.add_tokens(["a b"])
    assert run()[2] == 1


def test_stream_is_lazy_and_its_report_grows(tiny):
    read = []

    def rows():
        for i in range(200):
            read.append(i)
            yield {"text": "w " * (i + 1)} if i != 5 else {"text": "x", "input": None}

    stream, report = tokenize_dataset(IterableDataset.from_generator(rows), tiny, TokenizeOptions(max_length=50))
    assert isinstance(stream, IterableDataset)
    assert len(read) <= 2
    whole, whole_report = tokenize(
        tiny, [{"text": "w " * (i + 1) if i != 5 else "x"} for i in range(200)], max_length=50
    )
    assert next(iter(stream)) == whole[0]
    assert report.rows < 200
    for _ in range(2):  # the second pass counts afresh
        assert list(stream) == list(whole)
        assert report == whole_report


def test_report_of_a_stream_without_a_usable_row(tiny):
    stream, report = tokenize_dataset(
        IterableDataset.from_generator(lambda: iter([{"input_ids": [3]}])), tiny, TokenizeOptions()
    )
    assert list(stream) == []
    with pytest.raises(ValueError, match="all 1 rows were dropped"):
        report.check_not_empty(1024)
    empty = IterableDataset.from_generator(lambda: iter([]))
    with pytest.raises(ValueError, match="no rows"):
        tokenize_dataset(empty, tiny, TokenizeOptions())


def test_stream_of_structs(tiny):
    """A stream of a data set with features: keys of other rows are removed there too."""
    data = Dataset.from_list([{"messages": M1}, {"messages": [M1[0], {**M1[1], "reasoning_content": "R"}]}])
    stream, _ = tokenize_dataset(data.to_iterable_dataset(), tiny, TokenizeOptions())
    assert list(stream) == list(tokenize(tiny, data)[0])


def test_encoder_can_be_pickled(tiny):
    from jaxtrl.rows.tokenize import _plan

    data = load_source([{"text": "a b"}])
    encoder, _ = _plan(data, data[0], ["text"], tiny, TokenizeOptions(), None)
    again = pickle.loads(pickle.dumps(encoder))
    batch = {"text": ["a b"]}
    assert again.encode(batch, [0], True)[0].input_ids == encoder.encode(batch, [0], True)[0].input_ids


def test_shown_example_marks_trained_tokens(tiny):
    ids = tiny("Q [b]: A")["input_ids"]
    mask = [False] * (len(ids) - 1) + [True]
    text = show_example(tiny, ids, mask)
    assert text == "[dim]Q \\[b]: [/dim][green]A[/green]"
    assert show_example(tiny, np.array(ids), np.array(mask), limit=2).endswith(f"\n... ({len(ids) - 2} more tokens)")

    from rich.text import Text

    shown = Text.from_markup(text)
    assert shown.plain == "Q [b]: A"
    assert [(span.start, span.end, span.style) for span in shown.spans] == [(0, 7, "dim"), (7, 8, "green")]


# TRL on real data


def prepare_with_trl(dataset, tokenizer, completion_only, formatting_func=None, **config):
    """TRL's own preparation of a data set, without building its trainer (a model)."""
    pytest.importorskip("torch")
    trl = pytest.importorskip("trl")
    from accelerate import PartialState
    from trl.chat_template_utils import get_training_chat_template

    PartialState()  # TRL's logger needs it
    args = SimpleNamespace(
        **{
            "dataset_num_proc": None,
            "dataset_text_field": "text",
            "assistant_only_loss": False,
            "max_length": 1024,
            "truncation_mode": "keep_start",
            "shuffle_dataset": False,
            **config,
        }
    )
    trainer = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=get_training_chat_template(tokenizer) if args.assistant_only_loss else None,
        completion_only_loss=completion_only,
    )
    rows = trl.SFTTrainer._prepare_dataset(trainer, dataset, tokenizer, args, False, formatting_func, "train")
    return [
        {"input_ids": row["input_ids"], "loss_mask": [False] + [label != -100 for label in row["labels"][1:]]}
        for row in rows
    ]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("file", "rows", "columns", "options"),
    [
        ("chat_multiturn.jsonl", 120, {}, {}),
        ("chat_multiturn.jsonl", 120, {}, {"assistant_only_loss": True}),
        ("chat_multiturn.jsonl", 60, {}, {"max_length": 200, "truncation_mode": "keep_end"}),
        ("glaive_tool_chat_en.jsonl", 60, {}, {"max_length": None}),
        ("glaive_tool_chat_en.jsonl", 60, {}, {"assistant_only_loss": True}),
        ("gsm8k_train-00000-of-00002.jsonl", 300, {"solution": "completion"}, {}),
        ("gsm8k_train-00000-of-00002.jsonl", 300, {"solution": "completion"}, {"max_length": 70}),
        ("gsm8k_train-00000-of-00002.jsonl", 100, {"solution": "completion"}, {"completion_only_loss": False}),
        ("gsm8k_train-00000-of-00002.jsonl", 100, {"solution": "text", "prompt": "x"}, {}),
        ("agent_turns_sample.jsonl", 20, {}, {"max_length": None}),
        ("agent_turns_sample.jsonl", 20, {}, {"max_length": 6000, "assistant_only_loss": True}),
        ("tau_airline_trial0.jsonl", 8, {}, {"max_length": 5000, "assistant_only_loss": True}),
    ],
)
def test_ids_and_labels_are_trls(qwen3_tokenizer, shared_data, file, rows, columns, options):
    dataset = load_source(shared_data / "jsonl" / file, split=f"train[:{rows}]").rename_columns(columns)
    ours, report = tokenize_dataset(dataset, qwen3_tokenizer, TokenizeOptions(**options))
    config = {key: value for key, value in options.items() if key != "completion_only_loss"}
    completion_only = options.get("completion_only_loss", "completion" in dataset.column_names)
    raw = Dataset.from_list([json.loads(json.dumps(row)) for row in dataset], on_mixed_types="use_json")
    theirs = prepare_with_trl(raw, qwen3_tokenizer, completion_only, **config)
    assert list(ours) == theirs
    assert report.rows == rows
    assert report.kept == len(theirs)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sharegpt_and_template_kwargs_are_trls(qwen3_tokenizer, shared_data):
    rows = list(load_source(shared_data / "jsonl" / "chat_multiturn.jsonl", split="train[:20]"))
    sharegpt = [
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in row["messages"]]} for row in rows
    ]
    pairs = [
        {
            "prompt": row["messages"][:1],
            "completion": row["messages"][1:2],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        for row in rows
    ]
    for source, completion_only in ((sharegpt, False), (pairs, True)):
        ours, _ = tokenize(qwen3_tokenizer, source)
        assert list(ours) == prepare_with_trl(Dataset.from_list(source), qwen3_tokenizer, completion_only)


@pytest.mark.slow
def test_agent_turns_have_the_known_number_of_tokens(qwen3_tokenizer, shared_data):
    rows, report = tokenize(qwen3_tokenizer, shared_data / "jsonl" / "agent_turns_sample.jsonl", max_length=None)
    assert (report.rows, report.kept, report.tokens) == (75, 75, 296_689)
    assert len(rows) == 75
