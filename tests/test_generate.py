"""`python -m jaxtrl.generate`: the embedded default, files of prompts, chat, wrong input."""

import json
import re
import sys

import numpy as np
import pytest

from jaxtrl import Sampler, generate
from jaxtrl.assets import tokenizer_path
from jaxtrl.trainers.generate_config import GenerateConfig
from jaxtrl.trainers.model_source import load_tokenizer, tiny_model


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tokenizer_path())


def test_the_default_answers_a_sample_prompt(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert generate.main(["--max_new_tokens", "9", "--seed", "3"]) == 0
    first = capsys.readouterr()
    assert len(first.out) > 1
    assert re.match(r"9 tokens in .* tokens/s without the \d+\.\d s of compiling, .* with them", first.err)
    assert generate.main(["--max_new_tokens", "9", "--seed", "3", "--prompt", generate.SAMPLE]) == 0
    assert capsys.readouterr().out == first.out


def test_a_file_of_prompts_gives_lines_of_json(tmp_path, capsys):
    rows = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "two"}]}, {"prompt": "three"}]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    flags = ["--prompts", str(file), "--output", str(out), "--num_generations", "2", "--max_new_tokens", "5"]
    assert generate.main([*flags, "--top_k", "40", "--seed", "1", "--slots", "3", "--system", "Be brief."]) == 0
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert sorted((line["prompt"], line["generation"]) for line in lines) == [(p, g) for p in range(3) for g in (0, 1)]
    for line in lines:
        assert len(line["token_ids"]) == len(line["logps"]) == len(line["sampled_logps"]) <= 5
        assert line["finish_reason"] == ("length" if line["stop"] is None else "stop")
        assert np.all(np.array(line["sampled_logps"]) >= np.array(line["logps"]) - 1e-5)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "prompts.jsonl:1 is not valid JSON"),
        ('{"text": 1}', "prompts.jsonl:1 has no prompt"),
        ('{"prompt": "a"}\n{"prompt": []}', "prompts.jsonl:2 has no prompt"),
        ("\n", "has no prompts"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, capsys, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    assert generate.main(["--prompts", str(file)]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top_p", "2"], "top_p is 2.0: it must be"),
        (["--prompt", "a", "--prompts", "b"], "both given"),
        (["--raw", "--prompt", "a", "--system", "b"], "raw takes the prompt as it is"),
        (["--temprature", "1"], "temperature"),
    ],
)
def test_wrong_flags_are_usage_errors(capsys, flags, message):
    with pytest.raises(SystemExit) as error:
        generate.main(flags)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_files_and_models_exit_with_1(tmp_path, capsys):
    assert generate.main(["--prompts", str(tmp_path / "none.jsonl")]) == 1
    assert generate.main(["--model", str(tmp_path / "none"), "--prompt", "a"]) == 1
    assert capsys.readouterr().err.count("error: ") == 2


def test_a_raw_prompt_passes_no_template(tokenizer):
    args = GenerateConfig(raw=True, prompt="some text")
    (prompt,) = generate.read_prompts(args)
    assert tokenizer.decode(generate.encode(args, tokenizer, prompt)) == "some text"
    args = GenerateConfig(prompt="some text", system="Be brief.")
    (prompt,) = generate.read_prompts(args)
    text = tokenizer.decode(generate.encode(args, tokenizer, prompt))
    assert text.index("Be brief.") < text.index("user") < text.index("some text") < text.index("assistant")


def test_a_chat_keeps_its_turns_and_ends_at_an_empty_line(tokenizer, capsys, monkeypatch):
    seen = []

    class Listening(Sampler):
        def stream(self, prompts, *args, **kwargs):
            seen.append(tokenizer.decode(prompts[0]))
            return super().stream(prompts, *args, **kwargs)

    sampler = Listening(tiny_model(0)[0], slots=1, max_length=200, eos_token_id=())
    turns = iter(["How are you?", "And why?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(turns))
    args = GenerateConfig(seed=5, max_new_tokens=6)
    generate.chat(args, sampler, tokenizer)
    ids = tokenizer.encode(seen[0], add_special_tokens=False)
    first = tokenizer.decode(sampler.generate([ids], args.sampling_params())[0].token_ids, skip_special_tokens=True)
    assert first.strip()
    assert capsys.readouterr().out.startswith(first + "\n")
    assert seen[1].index("How are you?") < seen[1].index(first) < seen[1].index("And why?")
    assert "And why?" not in seen[0]


def test_a_chat_that_outgrows_max_length_says_what_it_leaves_out(tokenizer, capsys, monkeypatch):
    sampler = Sampler(tiny_model(0)[0], slots=1, max_length=72, eos_token_id=())
    prompts = []
    stream = sampler.stream
    monkeypatch.setattr(sampler, "stream", lambda ids, *a, **k: (prompts.append(ids[0]), stream(ids, *a, **k))[1])
    turns = iter(["How are you?", "What is one and one?", "word " * 200, "And why?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(turns))
    generate.chat(GenerateConfig(seed=5, max_new_tokens=24, system="Be brief."), sampler, tokenizer)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said if "left out" in line]
    assert sum("this message of" in line for line in said) == 1
    assert all("24 new tokens do not fit --max_length 72" in line for line in said)
    assert len(prompts) == 3
    assert all(len(ids) + 24 <= 72 and "Be brief." in tokenizer.decode(ids) for ids in prompts)
    assert "And why?" in tokenizer.decode(prompts[-1])
    assert "word word" not in tokenizer.decode(prompts[-1])


def test_half_a_character_waits_for_the_rest(capsys):
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    printer = generate.Printer(Bytes())
    first, rest = "aé".encode()[:2], "é".encode()[1:]
    printer(0, 0, list(first))
    assert capsys.readouterr().out == ""
    printer(0, 0, list(rest))
    assert capsys.readouterr().out == "aé"
    printer(0, 0, list(first[1:]))
    printer.end()
    assert capsys.readouterr().out == "\ufffd\n"
