"""Metrics: the file that survives kills, trackers that are imported on request only, the terminal."""

import io
import json
import sys
import types

import pytest

from jaxtrl.trainers.logging import Display, MetricsFile, check_trackers, log_table, open_trackers, trim_metrics


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_is_on_disk_when_log_returns(tmp_path):
    file = MetricsFile(tmp_path / "out" / "metrics.jsonl")
    file.log({"loss": 0.1 + 0.2}, 1)
    assert lines(tmp_path / "out" / "metrics.jsonl") == [{"step": 1, "loss": 0.1 + 0.2}]
    file.close()


def test_a_new_run_starts_a_new_file_and_a_resumed_one_has_no_duplicates(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 99, "loss": 1}\n')
    trim_metrics(path, None)
    file = MetricsFile(path)
    for step in (1, 2, 3, 4):
        file.log({"loss": float(step)}, step)
    file.log({"eval_loss": 2.0}, 2)
    file.log({"train_runtime": 2.0}, 2)
    file.close()
    with path.open("a") as handle:
        handle.write('{"step": 2, "lo')  # cut short by the kill
    trim_metrics(path, 2)
    resumed = MetricsFile(path)
    resumed.log({"loss": 3.0}, 3)
    resumed.close()
    assert lines(path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 2, "eval_loss": 2.0},
        {"step": 3, "loss": 3.0},
    ]


def test_resuming_without_a_file_starts_one(tmp_path):
    trim_metrics(tmp_path / "metrics.jsonl", 5)
    assert lines(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_tracker_is_one_sentence(name, monkeypatch):
    package = {"tensorboard": "tensorboardX"}.get(name, name)
    monkeypatch.setitem(sys.modules, package, None)  # import raises ImportError
    with pytest.raises(ValueError, match=rf"report_to names {name}, .*pip install 'jaxtrl\[{name}\]'"):
        check_trackers([name])


class FakeRun(types.ModuleType):
    def __init__(self):
        super().__init__("fake")
        self.calls = []

    def init(self, **kwargs):
        self.calls.append(("init", kwargs))

    def log(self, metrics, step):
        self.calls.append(("log", metrics, step))

    def finish(self):
        self.calls.append(("finish",))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_runs_get_config_and_grouped_names(name, tmp_path, monkeypatch):
    module = FakeRun()
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    (tracker,) = open_trackers([name], folder=tmp_path, run_name="r", project="p", config={"a": 1})
    tracker.log({"loss": 1.0, "eval_loss": 2.0}, 3)
    tracker.close()
    assert module.calls == [
        ("init", {"project": "p", "name": "r", "config": {"a": 1}}),
        ("log", {"train/loss": 1.0, "eval/loss": 2.0}, 3),
        ("finish",),
    ]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tables_go_to_the_trackers_that_have_them(name, tmp_path, monkeypatch):
    module = FakeRun()
    module.Table = lambda dataframe: ("table", dataframe.to_dict("list"))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=lambda *_, **__: None))
    trackers = open_trackers(["tensorboard", name], folder=tmp_path, run_name="r", project="p", config={})
    log_table(trackers, "completions", {"prompt": ["a", "b"], "reward": [1.0, None]}, 7)
    kind, metrics, step = module.calls[-1]
    assert (kind, step, list(metrics)) == ("log", 7, ["completions"])
    marker, columns = metrics["completions"]
    assert (marker, columns["prompt"], columns["reward"][0]) == ("table", ["a", "b"], 1.0)
    assert columns["reward"][1] != columns["reward"][1], "none is NaN"


def test_a_tracker_that_does_not_start_is_one_sentence_and_closes_the_others(tmp_path, monkeypatch):
    class WithoutKey(FakeRun):
        def init(self, **kwargs):
            raise RuntimeError("No API key configured.")

    first = FakeRun()
    monkeypatch.setitem(sys.modules, "trackio", first)
    monkeypatch.setitem(sys.modules, "wandb", WithoutKey())
    with pytest.raises(ValueError, match=r"report_to names wandb, .*No API key configured.*WANDB_MODE=offline"):
        open_trackers(["trackio", "wandb"], folder=tmp_path, run_name="r", project="p", config={})
    assert first.calls[-1] == ("finish",)


def test_tensorboard_purges_what_the_killed_run_logged(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, *args):
            calls.append(args)

        def flush(self):
            pass

        def close(self):
            pass

    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    (tracker,) = open_trackers(["tensorboard"], folder=tmp_path, run_name="r", project="p", config={}, resume_step=4)
    tracker.log({"loss": 1.0, "note": "text"}, 5)
    tracker.close()
    assert calls == [(str(tmp_path / "runs"), 5), ("train/loss", 1.0, 5)]


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    display = Display(file=out)
    display.start(20, 0)
    display.step(10)
    display.log({"loss": 1.23456, "tokens_per_second": 12345.6, "epoch": 0.5}, 10, seconds_left=61.2)
    display.log({"eval_loss": 2.0, "epoch": 0.5}, 10)
    display.stop()
    assert out.getvalue().splitlines() == [
        "step 10/20  loss 1.235  tokens/s 12346  left 1:01",
        "step 10/20  eval_loss 2",
    ]


def test_the_bar_shows_loss_speed_and_time_left():
    out = io.StringIO()
    display = Display(bar=True, file=out)
    display._console._force_terminal = True
    display.start(20, 5)
    display.step(10)
    display.log({"loss": 1.5, "tokens_per_second": 200.0}, 10)
    display.stop()
    text = out.getvalue()
    assert "10/20" in text
    assert "loss 1.5  200 tokens/s" in text
