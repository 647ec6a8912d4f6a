"""Prompts: rendering, what is dropped, and the one shape of a run."""

import pytest

from jaxtrl.trainers.grpo_data import prepare_prompts, prompt_room, row_shape


def test_prompts_are_rendered_and_the_other_columns_kept(tiny_tokenizer):
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    data = prepare_prompts([{"prompt": messages, "answer": "3"}], tiny_tokenizer, 768, 100)
    (prompt,) = data.prompts
    expected = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt.ids == list(expected)
    assert (prompt.prompt, prompt.columns) == (messages, {"answer": "3"})
    text = prepare_prompts([{"prompt": "1 + 2 ="}], tiny_tokenizer, 768, 100).prompts[0]
    assert text.ids == tiny_tokenizer.encode("1 + 2 =")


def test_long_prompts_are_dropped_and_counted(tiny_tokenizer):
    rows = [{"prompt": "1 + 2 ="}, {"prompt": "1 + 2 + 3 + 4 + 5 + 6 + 7 ="}]
    short = len(tiny_tokenizer.encode(rows[0]["prompt"]))
    data = prepare_prompts(rows, tiny_tokenizer, 768, short)
    assert [prompt.row for prompt in data.prompts] == [0]
    assert data.dropped == 1
    assert "1 dropped" in data.describe()
    with pytest.raises(ValueError, match=f"all 2 are longer than the {short - 1} tokens"):
        prepare_prompts(rows, tiny_tokenizer, 768, short - 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "no column prompt; its columns are text"),
        ({"prompt": 3}, "row 0 of the prompts: the prompt must be a text or a list of messages"),
        ({"prompt": ""}, "row 0 of the prompts: the prompt is empty"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "ends with an assistant's turn"),
    ],
)
def test_wrong_prompts_are_named(tiny_tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        prepare_prompts([row], tiny_tokenizer, 768, 100)


def test_room_for_prompts():
    assert prompt_room(1024, 100, None) == 924
    assert prompt_room(1024, 100, 512) == 412
    with pytest.raises(ValueError, match=r"max_completion_length: 512 tokens leave no room .* token_budget \(512\)"):
        prompt_room(1024, 512, 512)


def test_one_shape_holds_whatever_a_run_may_sample(tiny_tokenizer):
    data = prepare_prompts([{"prompt": "1 + 2 ="}] * 3, tiny_tokenizer, 768, 900)
    shape = row_shape(data, 8, 100, None)
    assert shape.tokens == 128
    assert 100 <= shape.slots <= 128
    assert row_shape(data, 8, 100, 1000).tokens == 1024
    long = data._replace(prompts=[data.prompts[0]._replace(ids=[5] * 800)])
    assert row_shape(long, 2, 100, 4096).slots == 896  # the share 200 / 1,000 of 4,096, in blocks
