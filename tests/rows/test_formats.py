"""Rows of every format, and rows that are wrong."""

import json

import numpy as np
import pytest
from datasets import Dataset, Features, Json, List, Value

from jaxtrl.rows.formats import Conversation, Text, column_readers, detect_format, parse_row, parse_tokens

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def error_of(row, form="messages") -> str:
    with pytest.raises(ValueError, match=r".") as info:
        parse_row(row, form, "text")
    return str(info.value)


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        (["input_ids", "messages"], "tokens"),
        (["prompt", "completion", "messages", "text"], "prompt_completion"),
        (["prompt", "messages"], "messages"),  # as UltraChat has it
        (["conversations", "text"], "conversations"),
        (["text", "id"], "text"),
    ],
)
def test_format_from_columns(columns, form):
    assert detect_format(columns, "text") == form


def test_no_format():
    assert detect_format(["body"], "body") == "text"
    with pytest.raises(ValueError, match=r"no `completion`.*`prompt`, `answer`"):
        detect_format(["prompt", "answer"], "text")
    with pytest.raises(ValueError, match=r"no column to train on.*`a`"):
        detect_format(["a"], "text")
    with pytest.raises(ValueError, match="packed already"):
        detect_format(["input_ids", "seq_lengths"], "text")


def test_messages_lose_their_none_keys_only():
    row = {"messages": [{**USER, "tool_calls": None, "name": None}, {**ANSWER, "x": {"y": None}}]}
    assert parse_row(row, "messages", "text").messages == [USER, {**ANSWER, "x": {"y": None}}]


def test_sharegpt_names_and_roles():
    turns = [("system", "S"), ("human", "Q"), ("function_call", '{"name": "f", "arguments": {"a": 1}}')]
    turns += [("observation", "R"), ("gpt", "A")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert parse_row(row, "conversations", "text").messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
        {"role": "tool", "content": "R"},
        {"role": "assistant", "content": "A"},
    ]
    assert parse_row({"conversations": [USER, ANSWER]}, "conversations", "text").messages == [USER, ANSWER]


def test_prompt_and_completion():
    row = {"prompt": "a", "completion": "b"}
    assert parse_row(row, "prompt_completion", "text") == Text("ab", "a")
    row = {"prompt": [USER], "completion": [ANSWER], "tools": [], "chat_template_kwargs": None}
    assert parse_row(row, "prompt_completion", "text") == Conversation([USER, ANSWER], 1, None, {})
    assert "both be text" in error_of({"prompt": "a", "completion": [ANSWER]}, "prompt_completion")
    assert error_of({"prompt": [USER]}, "prompt_completion") == "no `completion` (missing or null)"
    assert error_of({"completion": "b"}, "prompt_completion") == "no `prompt` (missing or null)"
    assert "empty list" in error_of({"prompt": [USER], "completion": []}, "prompt_completion")


def test_tools_as_list_json_text_or_list_of_json_texts():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 0.1, "a": None}}}]
    for value in (tools, json.dumps(tools), [json.dumps(tools[0])]):
        assert parse_row({"messages": [USER], "tools": value}, "messages", "text").tools == tools
    for value in (None, [], "", "[]"):
        assert parse_row({"messages": [USER], "tools": value}, "messages", "text").tools is None
    assert "not valid JSON" in error_of({"messages": [USER], "tools": "[{]"})
    assert "must be a list" in error_of({"messages": [USER], "tools": {"name": "f"}})
    assert "JSON schemas" in error_of({"messages": [USER], "tools": [3]})


def test_containers_may_be_json_text():
    row = {"messages": json.dumps([USER]), "chat_template_kwargs": '{"enable_thinking": false, "x": null}'}
    assert parse_row(row, "messages", "text") == Conversation([USER], None, None, {"enable_thinking": False})
    call = {"role": "assistant", "tool_calls": json.dumps([CALL])}
    assert parse_row({"messages": [call]}, "messages", "text").messages[0]["tool_calls"] == [CALL]


def test_tool_calls_are_checked():
    def message(**call):
        return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}

    parsed = parse_row(message(function={"name": "f", "arguments": None}), "messages", "text")
    assert parsed.messages == [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    ]
    assert "function with a name" in error_of(message(function={"arguments": {}}))
    assert "must be a list" in error_of({"messages": [{**ANSWER, "tool_calls": 3}]})


def test_content_as_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        parse_row({"messages": [{"role": "user", "content": parts}]}, "messages", "text").messages[0]["content"] == "ab"
    )
    image = {"role": "user", "content": [{"type": "image", "image": "x"}]}
    assert "message 1: content of type 'image'" in error_of({"messages": [USER, image]})


def test_wrong_messages():
    assert error_of({"text": "x"}) == "no `messages` (missing or null)"
    assert "must be a list of messages, found dict" in error_of({"messages": {"role": "user"}})
    assert "message 0: expected a dict" in error_of({"messages": ["hi"]})
    assert "message 1: no role" in error_of({"messages": [USER, {"content": "x"}]})
    assert "message 0 (role 'user'): no content" in error_of({"messages": [{"role": "user"}]})
    assert "content must be text" in error_of({"messages": [{"role": "user", "content": 3}]})
    assert error_of({"text": None}, "text") == "no `text` (missing or null)"
    assert error_of({"text": 3}, "text") == "`text` must be text, found int"
    reasoning = {"role": "assistant", "reasoning_content": "R"}
    assert parse_row({"messages": [reasoning]}, "messages", "text").messages[0]["content"] == ""


def test_tokens_and_masks():
    assert parse_tokens({"input_ids": [5, 6, 7]}, True) == ([5, 6, 7], [True] * 3)
    assert parse_tokens({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, True).loss_mask == [False, True, False]
    row = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}
    assert parse_tokens(row, True).loss_mask == [False, True, False]
    assert parse_tokens(row, False).loss_mask == [True, True, False]
    padded = {"input_ids": [0, 0, 5, 6], "labels": [-100, -100, -100, 6], "attention_mask": [0, 0, 1, 1]}
    assert parse_tokens(padded, True) == ([5, 6], [False, True])
    for value in ("[5, 6]", np.array([5, 6])):
        assert parse_tokens({"input_ids": value}, True).input_ids == [5, 6]
    for row, message in (
        ({"input_ids": [5, 6], "labels": [5]}, "`labels` has 1 entries for 2 input_ids"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "label 6 at position 0"),
        ({"input_ids": [5, -1]}, "negative id -1"),
        ({"input_ids": [True, False]}, "holds true or false"),
        ({"input_ids": [5, "a"]}, "list of integers"),
        ({"input_ids": None}, "no `input_ids`"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_tokens(row, True)


def test_struct_keys_of_other_rows_are_removed_but_written_nulls_stay():
    """Arrow unifies the structs of a column; a JSON column keeps what was written."""
    tools = [[{"p": {"a": 1}}], [{"p": {"b": "x"}}]]
    dataset = Dataset.from_dict({"tools": tools})
    assert dataset[0]["tools"] == [{"p": {"a": 1, "b": None}}]
    reader = column_readers(dataset.features, keep_none=False, json_text=True)["tools"]
    assert [reader(row["tools"]) for row in dataset] == tools
    kept = column_readers(dataset.features, keep_none=True, json_text=True)["tools"]
    assert kept(dataset[0]["tools"]) == dataset[0]["tools"]

    features = Features({"a": List({"x": Json(), "y": Value("string")}), "b": List(Value("int64"))})
    readers = column_readers(features, keep_none=False, json_text=True)
    assert set(readers) == {"a"}
    assert readers["a"]([{"x": '{"n": null, "f": 0.1234567890123456}', "y": None}]) == [
        {"x": {"n": None, "f": 0.1234567890123456}}
    ]
    assert column_readers(None, keep_none=False, json_text=True) == {}
