"""Prefetching keeps the order, hands errors over in their turn and ends its thread."""

import threading

import pytest

from jaxtrl.trainers.prefetch import prefetch


def prefetching():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_order():
    assert list(prefetch(iter(range(100)), 3)) == list(range(100))
    assert not prefetching()


def test_an_error_comes_after_the_items_before_it():
    def items():
        yield 1
        yield 2
        raise ValueError("third")

    stream = prefetch(items())
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(stream)
    assert not prefetching()


def test_it_works_ahead_but_not_without_bound():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    stream = prefetch(items(), 2)
    assert next(stream) == 0
    deadline = threading.Event()
    for _ in range(50):
        if len(made) == 4:  # one taken, two waiting, one in hand
            break
        deadline.wait(0.1)
    deadline.wait(0.2)
    assert len(made) == 4
    stream.close()
    assert not prefetching()
