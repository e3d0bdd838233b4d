"""Blocks that note Ctrl-C leave the handler of whoever is still there, in whatever order they end."""

import signal

from jaxpaged.interrupts import noted_interrupts


def test_blocks_that_end_in_order_put_back_what_was_there() -> None:
    before = signal.getsignal(signal.SIGINT)
    with noted_interrupts() as outer:
        with noted_interrupts() as inner:
            assert signal.getsignal(signal.SIGINT) == inner.note
        assert signal.getsignal(signal.SIGINT) == outer.note
    assert signal.getsignal(signal.SIGINT) == before


def test_an_inner_block_that_outlives_the_outer_one_leaves_no_stale_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    outer, inner = noted_interrupts(), noted_interrupts()
    outer.__enter__()
    noted = inner.__enter__()
    outer.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) == noted.note
    inner.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) == before
