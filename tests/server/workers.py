"""Clients that work at the same time."""

import threading
from collections.abc import Callable


def with_many_clients(number: int, work: Callable[[int], None], num_clients: int = 16) -> None:
    """Does it so often, by several threads."""
    failures: list[BaseException] = []

    def run(first: int) -> None:
        try:
            for index in range(first, number, num_clients):
                work(index)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
