"""Issue 4: how many programs and how much padding real data sets take, from lengths alone."""

import numpy as np
import pytest

from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.needs import Needs
from jaxtrl.rows.order import BatchSizes
from jaxtrl.rows.sources import load_source
from jaxtrl.rows.tokenize import TokenizeOptions, tokenize_dataset
from jaxtrl.trainers.data import Batches, Lines, Packing

STEPS = 500


@pytest.fixture(scope="module")
def tokenized(shared_data, qwen3_tokenizer):
    """tokenized(file name, assistant_only) -> the tokenised data set, nothing truncated."""
    done = {}

    def get(name, assistant_only):
        if (name, assistant_only) not in done:
            options = TokenizeOptions(max_length=None, assistant_only_loss=assistant_only)
            source = load_source(str(shared_data / "jsonl" / name))
            done[name, assistant_only] = tokenize_dataset(source, qwen3_tokenizer, options)[0]
        return done[name, assistant_only]

    return get


def account(batches: Batches, seed=42, steps=STEPS, accumulation=1):
    """(programs, share of padding, visited over needed attention blocks with padding lanes counted) of a run."""
    run = batches.foresee(BatchSizes(batches.per_device, 1, accumulation), steps, seed, shuffle=True)
    batches.fit(run)
    classes = [batches.shapes.class_of(need) for need in run.needs.each()]
    padded = sum(shape.tokens for shape in classes)
    visited = sum(shape.tokens // 128 + shape.lanes for shape in classes)
    return len(set(classes)), 1 - run.tokens.sum() / padded, visited / run.blocks.sum()


@pytest.mark.parametrize("seed", [42, 0, 7])
def test_chats_under_auto_and_optimal(tokenized, seed):
    lines = Lines(tokenized("chat_multiturn.jsonl", False))
    programs, padding, visits = account(Batches(lines, 4, "auto"), seed)
    assert programs <= 12
    assert padding <= 0.20
    assert visits <= 1.6
    programs, padding, visits = account(Batches(lines, 4, "optimal:6"), seed)
    assert programs <= 6
    assert padding <= 0.15
    assert visits <= 1.6


@pytest.mark.parametrize(("per_device", "padding"), [(1, 0.01), (4, 0.03)])
def test_chats_packed_to_2048_are_one_program_with_little_padding(tokenized, per_device, padding):
    """137 rows with 0.7 % padding; with 4 rows a step the last step of each epoch has one row."""
    batches = Batches(Lines(tokenized("chat_multiturn.jsonl", False), Packing("bfd", 2048)), per_device, "auto")
    programs, share, visits = account(batches)
    assert programs == 1
    assert share < padding
    assert visits <= (1.65 if per_device == 4 else 2.3)  # one class for rows of one document and of many
    programs, share, _ = account(batches, steps=137 // per_device)
    assert programs == 1
    assert share < 0.02


@pytest.mark.parametrize("name", ["tau_airline_trial0.jsonl", "tau_airline_trial1.jsonl", "agent_turns_sample.jsonl"])
@pytest.mark.parametrize("assistant_only", [False, True])
def test_agent_trajectories_take_at_most_12_programs(tokenized, name, assistant_only):
    lines = Lines(tokenized(name, assistant_only))
    for per_device in (1, 4, 8):
        programs, padding, visits = account(Batches(lines, per_device, "auto"))
        assert programs <= 12
        assert padding <= 0.25  # the ladder's steps are 1/3 or 1/2 apart
        assert visits <= 1.6
        programs, padding, visits = account(Batches(lines, per_device, "optimal:6"))
        assert programs <= 6
        assert padding <= 0.10
        assert visits <= 1.6


@pytest.mark.parametrize("name", ["chat_multiturn.jsonl", "glaive_tool_chat_en.jsonl"])
def test_assistant_only_chats_take_at_most_12_programs_and_merging_costs_little(tokenized, name):
    lines = Lines(tokenized(name, True))
    free = account(Batches(lines, 4, "auto", max_programs=1000))
    merged = account(Batches(lines, 4, "auto"))
    assert merged[0] <= 12 < free[0]
    assert merged[1] <= free[1] + 0.01
    assert merged[2] <= 1.6


def test_fewer_programs_waste_more(tokenized):
    lines = Lines(tokenized("chat_multiturn.jsonl", True))
    limits = (2, 4, 8, 16)
    accounts = [account(Batches(lines, 4, "none", max_programs=limit)) for limit in limits]
    assert [programs for programs, _, _ in accounts] == list(limits)
    assert accounts == sorted(accounts, key=lambda entry: -entry[1])
    assert accounts[2][1] < 0.12


def test_the_merged_set_does_not_depend_on_the_order(tokenized):
    lines = Lines(tokenized("chat_multiturn.jsonl", True))
    needs = Batches(lines, 4).foresee(BatchSizes(4), STEPS, 0, shuffle=True).needs
    order = np.random.default_rng(0).permutation(len(needs.tokens))
    fit = ShapeSet.from_setting("auto").fit
    assert fit(needs) == fit(Needs(*(field[order] for field in needs)))
