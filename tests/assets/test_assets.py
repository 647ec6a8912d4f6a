"""The bundled tokenizer and data: made by the committed script, correct, and fit for assistant-only loss."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from jaxtrl import assets

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = assets.tokenizer_path().parent
FILES = (
    "data/train.jsonl",
    "data/eval.jsonl",
    "data/prompts.jsonl",
    "data/eval_prompts.jsonl",
    "tokenizer/tokenizer_config.json",
    "tokenizer/chat_template.jinja",
)
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(assets.tokenizer_path())


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def marked(tokenizer, messages, **kwargs) -> str:
    """The text of a conversation that assistant-only loss trains, decoded."""
    out = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **kwargs
    )
    return tokenizer.decode([i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m])


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **fields) -> dict:
    return {"role": "assistant", "content": text, **fields}


def test_the_script_makes_the_committed_files(tmp_path):
    spec = importlib.util.spec_from_file_location("make_assets", REPOSITORY / "scripts" / "make_assets.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for run in ("first", "second"):
        script.write_assets(tmp_path / run)
    for name in (*FILES, "tokenizer/tokenizer.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    for name in FILES:
        assert (tmp_path / "first" / name).read_bytes() == (FOLDER / name).read_bytes(), name
    # Parsed, as another version of the tokenizers library may write the same tokenizer with other white space.
    made, committed = (json.loads((f / "tokenizer/tokenizer.json").read_text()) for f in (tmp_path / "first", FOLDER))
    for part in ("added_tokens", "normalizer", "pre_tokenizer"):
        assert made[part] == committed[part]
    for part in ("vocab", "merges"):
        assert made["model"][part] == committed["model"][part]


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 600_000


def test_paths_lead_to_the_files():
    paths = assets.sample_data_path, assets.eval_data_path, assets.prompts_path, assets.eval_prompts_path
    assert [len(read(path())) for path in paths] == [2000, 100, 500, 100]


def test_tokens(tokenizer):
    assert len(tokenizer) == 768
    assert max(tokenizer.get_vocab().values()) == 767
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", *"0123456789"):
        assert len(tokenizer.encode(token)) == 1, token
    assert len(set(tokenizer.encode("1234567890"))) == 10
    assert (
        tokenizer.decode(tokenizer.encode("a<think>b</think><|im_end|>"), skip_special_tokens=True)
        == "a<think>b</think>"
    )


@pytest.mark.parametrize("text", ["What is 23 + 45?", "Spell Straße 字 🙂\n\n\tnow  ", "a\r\nb", ""])
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    row = read(assets.eval_data_path())[0]["messages"]
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.apply_chat_template(row, tokenize=False) == tokenizer.apply_chat_template(row, tokenize=False)


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, user("1+1?"), assistant("2"), user("2+2?"), assistant("4")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    )
    assert marked(tokenizer, messages) == "2<|im_end|>\n4<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert text == prompt + "4<|im_end|>\n"
    for n in range(1, 6):
        assert text.startswith(tokenizer.apply_chat_template(messages[:n], tokenize=False))


def test_chat_template_keeps_reasoning_in_every_turn(tokenizer):
    block = "<think>\nadd\n</think>\n\n2<|im_end|>\n"
    for answer in (
        assistant("<think>\nadd\n</think>\n\n2"),
        assistant("add\n</think>\n\n2"),
        assistant("2", reasoning_content="add"),
    ):
        assert marked(tokenizer, [user("1+1?"), answer]) == block
        assert marked(tokenizer, [user("1+1?"), answer, user("2+2?"), assistant("4")]) == block + "4<|im_end|>\n"


def test_chat_template_writes_tools_and_calls(tokenizer):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    messages = [
        user("Look."),
        assistant("", tool_calls=[call, {"name": "look", "arguments": '{"at": 2}'}]),
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "y"},
        assistant("xy", tool_calls=None),
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, tools=[TOOL])
    assert '<tools>\n{"type": "function"' in text
    assert text.endswith(
        '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {"at": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nxy<|im_end|>\n"
    )
    assert marked(tokenizer, messages, tools=[TOOL]).startswith("<tool_call>")


def solve(question: str) -> str:
    """The right answer to a question of the sample data, found from its text."""
    if found := re.search(r"(\d+) (\+|-|\*|plus|minus|times) (\d+)", question):
        a, sign, b = int(found[1]), found[2], int(found[3])
    else:
        task, _, words = question.partition(": ")
        if words:
            return {
                "Repeat": words,
                "Reverse the order": " ".join(reversed(words.split())),
                "How many words": str(words.count(" ") + 1),
            }[task]
        word = question.rstrip(".").split()[1]
        return word.upper() if question.startswith("Write") else " ".join(word)
    return str(a + b if sign in ("+", "plus") else a - b if sign in ("-", "minus") else a * b)


@pytest.mark.parametrize("path", [assets.sample_data_path(), assets.eval_data_path()], ids=["train", "eval"])
def test_every_answer_is_right(path):
    sums = turns = 0
    for row in read(path):
        messages = [message for message in row["messages"] if message["role"] != "system"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            assert answer["content"] == solve(question["content"])
            turns += 1
            sums += bool(re.search(r"\d", question["content"]))
    assert 0.6 < sums / turns < 0.9  # four fifths of the draws, but chats that were drawn before are left out


def the_sum(question: str) -> tuple[str, ...]:
    a, sign, b = re.search(r"(\d+) (\+|-|\*|plus|minus|times) (\d+)", question).groups()
    return a, {"plus": "+", "minus": "-", "times": "*"}.get(sign, sign), b


def test_prompts_have_their_answers_and_are_different():
    train, evaluation = read(assets.prompts_path()), read(assets.eval_prompts_path())
    sums = [{the_sum(row["prompt"][0]["content"]) for row in rows} for rows in (train, evaluation)]
    assert not sums[0] & sums[1]
    rows = train + evaluation
    for row in rows:
        assert list(row) == ["prompt", "answer"]
        assert row["answer"] == solve(row["prompt"][0]["content"])
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows)


def test_evaluation_chats_are_not_in_the_training_file():
    train, evaluation = (
        [json.dumps(row) for row in read(p())] for p in (assets.sample_data_path, assets.eval_data_path)
    )
    assert len(set(train)) == len(train)
    assert not set(train) & set(evaluation)


def test_a_missing_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(assets, "files", lambda _: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer is missing: .* install it again"):
        assets.tokenizer_path()
