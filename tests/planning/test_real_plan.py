"""Issue 4: plans of real data, from lengths alone."""

import time

import numpy as np
import pytest
from datasets import Dataset

from jaxtrl.model.config import Qwen3Config
from jaxtrl.planning.document import make_plan
from jaxtrl.planning.make import prepare
from jaxtrl.planning.options import PlanConfig
from jaxtrl.rows.sources import load_source
from jaxtrl.rows.tokenize import TokenizeOptions, tokenize_dataset
from jaxtrl.trainers.sft_config import SFTConfig

OPTIONS = PlanConfig(seconds_per_compile=60.0, matmul_tflops=80.0)


@pytest.fixture
def planned(tmp_path, shared_data, qwen3_tokenizer, monkeypatch):
    monkeypatch.setattr("jaxtrl.planning.make.mesh_of", lambda sizes: None)
    config = Qwen3Config.from_pretrained(shared_data / "qwen3-tokenizer")

    def plan(data, **options):
        args = SFTConfig(output_dir=str(tmp_path), **options)
        source = str(shared_data / "jsonl" / data) if isinstance(data, str) else data
        return make_plan(prepare(args, config, qwen3_tokenizer, source), OPTIONS)

    return plan


@pytest.mark.slow
def test_chats(planned):
    found = planned("chat_multiturn.jsonl", per_device_train_batch_size=4, max_length=2400, max_steps=500)
    settings = {s["name"]: s for s in found["shape_cost"]["settings"]}
    auto = settings["this run: auto"]
    assert auto["programs"]["all"] <= 12
    assert auto["padding_share"] <= 0.20
    assert auto["visited_over_needed"] <= 1.6
    assert settings["optimal:6"]["programs"]["all"] <= 6
    assert settings["optimal:6"]["padding_share"] <= 0.15
    assert settings["none"]["programs"]["500"] > 200
    assert settings["packing bfd"]["programs"]["all"] == 1
    for mark in ("20", "500"):
        assert auto["minutes"][mark] < settings["128"]["minutes"][mark], "auto beats TRL's rule"
        assert settings["128"]["minutes"][mark] < settings["none"]["minutes"][mark]


@pytest.mark.slow
def test_agent_turns_share_by_trajectory(planned):
    found = planned("agent_turns_sample.jsonl", max_length=16384, num_train_epochs=1, per_device_train_batch_size=1)
    sharing = found["sharing"]
    by_trajectory, over_all = sharing["ratio_by"]["trajectory"], sharing["ratio_by"]["set"]
    assert by_trajectory["count"] == 14
    assert 1 < by_trajectory["ratio"] < over_all["ratio"]
    assert over_all["ratio"] > 14
    assert sharing["tree_rows_pay"]
    assert 1 < sharing["speedup"] < sharing["packing_ratio"]


@pytest.mark.slow
def test_fourteen_million_tokens_are_planned_within_a_minute(planned, shared_data, qwen3_tokenizer):
    """Agent turns 47 times, half of them with other ids, so that not everything is shared."""
    options = TokenizeOptions(max_length=None, prefix_preserving=True)
    rows, _ = tokenize_dataset(
        load_source(str(shared_data / "jsonl" / "agent_turns_sample.jsonl")), qwen3_tokenizer, options
    )
    rng = np.random.default_rng(0)
    ids = [np.array(row["input_ids"]) for row in rows]
    renamed = [rng.permutation(151936) if copy % 2 else np.arange(151936) for copy in range(47)]
    source = Dataset.from_list([{"input_ids": names[i].tolist()} for names in renamed for i in ids])
    start = time.process_time()
    found = planned(source, max_length=16384, num_train_epochs=3)
    assert found["data"]["tokens"] > 13.9e6
    assert time.process_time() - start < 60
