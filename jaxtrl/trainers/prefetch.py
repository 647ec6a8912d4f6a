"""The host prepares the next batches while the device computes."""

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, TypeVar

Item = TypeVar("Item")


def prefetch(iterator: Iterator[Item], size: int = 2) -> Generator[Item]:
    """The same items in the same order, made in a thread up to `size` ahead.

    What the iterator raises is raised here, in its turn. Closing the generator stops the thread.
    """
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(size)
    stopped = threading.Event()

    def put(entry: tuple[bool, Any]) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                ready.put(entry, timeout=0.1)
                break

    def work() -> None:
        try:
            for item in iterator:
                put((True, item))
                if stopped.is_set():
                    return
            put((False, None))
        except BaseException as error:  # handed over to the consumer
            put((False, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            more, item = ready.get()
            if not more:
                if item is not None:
                    raise item
                return
            yield item
    finally:
        stopped.set()
        thread.join(timeout=5)  # not for ever: a stream may wait for the network
