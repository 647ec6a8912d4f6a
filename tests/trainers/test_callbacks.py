"""Callbacks: when the flow logs, evaluates and saves, and that callbacks written for Transformers work and resume."""

from types import SimpleNamespace

import pytest

from jaxtrl.trainers.callbacks import EVENTS, Callbacks, TrainerCallback, TrainerControl, TrainerState


def arguments(**changed):
    default = {
        "logging_first_step": False,
        "logging_strategy": "steps",
        "eval_strategy": "no",
        "save_strategy": "steps",
        "eval_steps": None,
        "logging_steps": 3,
        "save_steps": 5,
    }
    return SimpleNamespace(**{**default, **changed})


def run(args, max_steps, epoch_length=4):
    """(kind, step) in the order in which the flow asks for it."""
    callbacks, state, asked = Callbacks([]), TrainerState(max_steps=max_steps), []
    state.compute_steps(args, max_steps)
    control = TrainerControl()

    def collect():
        asked.extend(
            (kind, state.global_step) for kind in ("log", "evaluate", "save") if getattr(control, f"should_{kind}")
        )
        control.new_step()

    while not control.should_training_stop:
        state.global_step += 1
        callbacks.call("on_step_end", args, state, control)
        collect()
        if state.global_step % epoch_length == 0:
            callbacks.call("on_epoch_end", args, state, control)
            collect()
    return asked


def test_steps():
    assert run(arguments(logging_first_step=True), 7) == [("log", 1), ("log", 3), ("save", 5), ("log", 6), ("save", 7)]


def test_epochs_and_shares():
    args = arguments(logging_strategy="no", save_strategy="epoch", eval_strategy="steps", eval_steps=0.5)
    assert run(args, 8) == [("evaluate", 4), ("save", 4), ("evaluate", 8), ("save", 8)]
    args = arguments(logging_strategy="epoch", save_strategy="no", eval_strategy="epoch")
    assert run(args, 6) == [("log", 4), ("evaluate", 4)]


def test_user_callbacks_change_the_control():
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert kwargs["model"] == "model"
            if state.global_step == 2:
                control.should_training_stop = True
                return control
            return None

    callbacks, state, control = Callbacks([Stop]), TrainerState(max_steps=9), TrainerControl()
    state.compute_steps(arguments(), 9)
    for step, expected in ((1, False), (2, True)):
        state.global_step = step
        callbacks.call("on_step_end", arguments(), state, control, model="model")
        assert control.should_training_stop is expected


def test_a_control_that_a_callback_made_itself_counts():
    class Own(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return TrainerControl(should_log=True)

    control, state = TrainerControl(), TrainerState(max_steps=9)
    state.compute_steps(arguments(), 9)
    Callbacks([Own]).call("on_step_end", arguments(), state, control)
    assert control.should_log


def test_transformers_callbacks_and_state_have_the_same_names():
    transformers = pytest.importorskip("transformers")
    assert all(hasattr(transformers.TrainerCallback, event) for event in EVENTS)
    transformers.TrainerState(**vars(TrainerState()))
    transformers.TrainerControl(**vars(TrainerControl()))


def test_stateful_callbacks_go_on_where_they_were():
    from transformers import EarlyStoppingCallback

    first = Callbacks([EarlyStoppingCallback(3), EarlyStoppingCallback(5)])
    first.callbacks[1].early_stopping_patience_counter = 2
    first.callbacks[2].early_stopping_patience_counter = 4
    second = Callbacks([EarlyStoppingCallback(3), EarlyStoppingCallback(5)])
    second.restore(first.state())
    assert [cb.early_stopping_patience_counter for cb in second.callbacks[1:]] == [2, 4]


def test_an_event_that_no_callback_has_is_an_error():
    with pytest.raises(AttributeError):
        Callbacks([]).call("on_nothing", None, TrainerState(), TrainerControl())
