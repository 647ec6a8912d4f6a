"""Built-in reward functions."""

import asyncio
import pickle
from fractions import Fraction

import pytest

from jaxtrl.rollout import rewards
from jaxtrl.rollout.rewards import accuracy_reward, exact_match, final_answer, find_reward


def message(text):
    return [{"role": "assistant", "content": text}]


def test_exact_match():
    texts = ["12", " 12\n", "<think>\n3 * 4\n</think>\n\n12", "012", "The answer is 12", ""]
    assert exact_match(texts, ["12"] * 6) == [1, 1, 1, 0, 0, 0]
    assert exact_match([message("12")], [12]) == [1]
    assert exact_match(["x"], [None]) == [None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 1,234.50.", Fraction(2469, 2)),
        ("so x = -3", Fraction(-3)),
        ("1/2", Fraction(1, 2)),
        ("that is 50%", Fraction(1, 2)),
        (r"2 + 2 is \boxed{4}, not 5", Fraction(4)),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{ x^{2} + 1 }", "x^{2}+1"),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)"),
        (r"cut off \boxed{12", Fraction(12)),
        ("nothing", None),
        ("1/0", None),
    ],
)
def test_final_answer(text, expected):
    assert final_answer(text) == expected


def test_accuracy():
    assert accuracy_reward([r"\boxed{0.5}", "3 or 4", "none"], [r"\frac{1}{2}", "4", "4"]) == [1, 1, 0]
    assert accuracy_reward([message("7")], answer=["7"]) == [1]
    assert accuracy_reward(["7"], ["no number"]) == [None]
    with pytest.raises(ValueError, match="needs a column solution or answer"):
        accuracy_reward(["7"])
    reasoned = rewards.reasoning_accuracy_reward(["<think>5</think> 7", "7"], ["7", "7"])
    assert reasoned == [1, 0]


def test_format_length_overlong_and_repetition():
    texts = ["<think>\na\n</think>\nb", "<think>\na", "a <think></think>", "<think><think></think>"]
    assert rewards.think_format_reward(texts) == [1, 0, 0, 0]
    assert rewards.length_reward([[1, 2, 3], []]) == [-3, 0]
    punish = rewards.get_soft_overlong_punishment(100, 20)
    assert punish(completion_ids=[[1] * n for n in (80, 90, 100, 101)]) == [0, -0.5, -1, -1]
    repeat = rewards.get_repetition_penalty_reward(2, -1.0)
    assert repeat(completion_ids=[[1, 2, 3, 4], [5] * 5, [1]]) == [0, -0.75, 0]
    with pytest.raises(ValueError, match="at most 0"):
        rewards.get_repetition_penalty_reward(2, 0.5)


def test_the_overlong_punishment_of_trls_command_has_its_name():
    punish = find_reward("get_soft_overlong_punishment")
    assert punish(completion_ids=[[0] * 1024, [0] * 1152, [0] * 1281]) == [0.0, -0.5, -1.0]


def test_functions_by_name_can_be_sent_to_workers():
    for function in (*rewards.REWARDS.values(), rewards.get_soft_overlong_punishment(8, 2)):
        assert pickle.loads(pickle.dumps(function)).__name__ == function.__name__
    assert find_reward("exact_match") is exact_match
    assert find_reward("asyncio.run") is asyncio.run
    for name in ("exact", "no_such_package.f", "asyncio.no_such_name", "asyncio.__doc__"):
        with pytest.raises(ValueError, match="reward_funcs: "):
            find_reward(name)


@pytest.mark.torch
def test_rewards_of_trl_give_the_same():
    pytest.importorskip("torch")
    theirs = pytest.importorskip("trl.rewards")
    texts = [message(t) for t in ("<think>\na\n</think>\nb", "<think>\na", "x<think></think>", "<think>a</think>")]
    assert theirs.think_format_reward(texts) == rewards.think_format_reward(texts)
    ids = [[1] * n for n in range(0, 120, 7)] + [[1, 2, 1, 2, 3]]
    for name, args in (("get_soft_overlong_punishment", (100, 20)), ("get_repetition_penalty_reward", (3, -1.0))):
        a, b = (getattr(module, name)(*args)(completion_ids=ids) for module in (theirs, rewards))
        assert a == pytest.approx(b)
