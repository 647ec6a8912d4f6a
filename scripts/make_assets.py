"""Makes the bundled assets in jaxtrl/assets: sample chats, arithmetic prompts and a tiny ChatML tokenizer.

    python scripts/make_assets.py [FOLDER]

Running it twice gives the same bytes; tests/assets/test_assets.py compares the committed files with what it makes. All
text is this project's own. The chats are easy on purpose (short sums, small text tasks), so that a model of about a
million parameters learns something from them in minutes on a CPU.
"""

import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ASSETS = Path(__file__).resolve().parents[1] / "jaxtrl" / "assets"
TRAIN_ROWS, EVAL_ROWS, PROMPT_ROWS, EVAL_PROMPT_ROWS = 2000, 100, 500, 100
HELD_OUT = 6  # one of so many different sums has prompts for evaluation only
VOCAB_SIZE = 768
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Qwen's splitting rule: words with the space before them, single digits, runs of punctuation, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZER_CONFIG = {
    "backend": "tokenizers",
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "model_max_length": 32768,
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "TokenizersBackend",
}
# ChatML as Qwen3 writes it. Every assistant turn is rendered the same way, wherever it stands, and what the assistant
# writes (with the end-of-turn token) is marked for assistant-only loss. Without reasoning there is no think block.
CHAT_TEMPLATE = r"""
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + ('\n\n' if tools else '') }}
    {%- endif %}
    {%- if tools %}
        {{- '# Tools\n\nThese functions may be called:\n<tools>\n' }}
        {%- for tool in tools %}
            {{- tool | tojson + '\n' }}
        {%- endfor %}
        {{- '</tools>\n\nA call is a JSON object with name and arguments inside <tool_call></tool_call>.' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- generation %}
            {%- if reasoning.strip('\n') %}
                {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
            {%- endif %}
            {{- content }}
            {%- for tool_call in message.tool_calls or [] %}
                {%- set function = tool_call.function or tool_call %}
                {{- '\n' if content or not loop.first else '' }}
                {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
                {{- function.arguments if function.arguments is string else function.arguments | tojson }}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".lstrip("\n")

WORDS = """
    apple bag bell bird boat book box bread cake cat chair clock cloud coat corn cow cup dog door duck egg fish flag fox
    frog goat grass green hand hat hen horse ice jar key kite lake lamp leaf lemon lion map milk moon mouse nest nut owl
    paper pear pen pig plum rain red ring river road rock rose salt sand ship shoe sky snow spoon star stone sun table
    tea tent tree wind wolf wood
""".split()  # noqa: SIM905 (a list of a hundred lines reads no better)
# Ordinary sentences for the tokenizer only, so that other English text does not fall apart into letters.
PLAIN_TEXT = """
The weather was good this morning, so we went for a long walk along the water and came back before it began to get dark.
There are many ways to do this, but not all of them are right: first find out what you want, make a plan and try it.
If you have a question about the program, please read the first page of the guide and look for the name of the function.
Each function has a name, a list of arguments and a short description; it returns the result as a string or as a number.
She said that she would be here in about an hour, because the last train had already left when they got to the station.
I think that people should be able to say what they know, what they do not know, and how they could find out more.
"""
SYSTEM_PROMPTS = ("Answer with the result only.", "You are a careful calculator.", "Be brief.")

Question = tuple[str, str]  # what the user asks, what the assistant answers


class Dice:
    """Random choices made from `random.Random.random`, the one method whose numbers Python keeps in all versions."""

    def __init__(self, seed: int):
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def number(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, items):
        return items[self.number(0, len(items) - 1)]


def arithmetic(dice: Dice) -> Question:
    """A sum, difference or product of small numbers in one of four phrasings; the answer is the number alone."""
    sign, word = dice.pick([("+", "plus")] * 8 + [("-", "minus")] * 2 + [("*", "times")])
    top = 9 if sign == "*" or dice.chance(0.75) else 20
    a, b = dice.number(0, top), dice.number(0, top)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    question = f"What is {a} {sign} {b}?"
    others = [f"Compute {a} {sign} {b}.", f"{a} {sign} {b} = ?", f"How much is {a} {word} {b}?"]
    return dice.pick([question] * 3 + others), str(result)


def sum_of(question: str) -> tuple[int, str, int]:
    """What an arithmetic question asks, however it is phrased."""
    a, sign, b = re.search(r"(\d+) (\S+) (\d+)", question).groups()
    return int(a), {"plus": "+", "minus": "-", "times": "*"}.get(sign, sign), int(b)


def _words(dice: Dice, low: int, high: int) -> list[str]:
    return [dice.pick(WORDS) for _ in range(dice.number(low, high))]


def text_task(dice: Dice) -> Question:
    """Copying, reversing, counting, spelling or capitals."""
    words = _words(dice, 2, 4)
    word, line = words[0], " ".join(words)
    return dice.pick(
        [
            (f"Repeat: {line}", line),
            (f"Reverse the order: {line}", " ".join(words[::-1])),
            (f"How many words: {line}", str(len(words))),
            (f"Write {word} in capitals.", word.upper()),
            (f"Spell {word}.", " ".join(word)),
        ]
    )


def chat(dice: Dice) -> list[dict[str, str]]:
    """A conversation of one to three questions, mostly one, mostly arithmetic."""
    messages = []
    if dice.chance(0.1):
        messages.append({"role": "system", "content": dice.pick(SYSTEM_PROMPTS)})
    for _ in range(dice.number(2, 3) if dice.chance(0.15) else 1):
        question, answer = (arithmetic if dice.chance(0.8) else text_task)(dice)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def different(draw: Callable[[Dice], object], seed: int) -> Iterator[object]:
    """Endless draws without repetition."""
    dice, seen = Dice(seed), set()
    while True:
        item = draw(dice)
        key = json.dumps(item)
        if key not in seen:
            seen.add(key)
            yield item


def make_data() -> dict[str, list[dict]]:
    """File name -> rows. No conversation of the evaluation file is in the training file, and no sum of the evaluation
    prompts is in the training prompts, however it is phrased."""
    chats = different(chat, seed=1)
    questions = different(arithmetic, seed=2)
    drawn = [next(questions) for _ in range(PROMPT_ROWS + EVAL_PROMPT_ROWS)]
    held_out = set(list(dict.fromkeys(sum_of(question) for question, _ in drawn))[HELD_OUT - 1 :: HELD_OUT])
    prompts = {False: [], True: []}
    for question, answer in drawn:
        row = {"prompt": [{"role": "user", "content": question}], "answer": answer}
        prompts[sum_of(question) in held_out].append(row)
    return {
        "train.jsonl": [{"messages": next(chats)} for _ in range(TRAIN_ROWS)],
        "eval.jsonl": [{"messages": next(chats)} for _ in range(EVAL_ROWS)],
        "prompts.jsonl": prompts[False][:PROMPT_ROWS],
        "eval_prompts.jsonl": prompts[True][:EVAL_PROMPT_ROWS],
    }


def make_tokenizer(data: dict[str, list[dict]]) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE entries, trained on the chats; ChatML tokens have the highest ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    messages = [message for row in data["train.jsonl"] for message in row["messages"]]
    texts = [text for message in messages for text in (message["role"], message["content"])]
    tokenizer.train_from_iterator([*texts, *PLAIN_TEXT.splitlines()], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def write_assets(folder: Path) -> None:
    """Writes all files below `folder`."""
    data = make_data()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    files = {f"data/{name}": "".join(json.dumps(row) + "\n" for row in rows) for name, rows in data.items()}
    files["tokenizer/tokenizer.json"] = make_tokenizer(data).to_str(pretty=True) + "\n"
    files["tokenizer/tokenizer_config.json"] = json.dumps(TOKENIZER_CONFIG, indent=2) + "\n"
    files["tokenizer/chat_template.jinja"] = CHAT_TEMPLATE
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())


if __name__ == "__main__":
    write_assets(Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS)
