"""The most pages that running sequences will need at once, if each ends when it is expected to."""

from collections.abc import Iterable
from typing import NamedTuple


class Demand(NamedTuple):
    """One sequence's share of the pool from now on.

    Attributes:
        remaining: tokens that it is expected to get still.
        num_pages: pages that it holds alone, those to come for what it has to compute already included.
    """

    remaining: int
    num_pages: float


def peak_pages(demands: Iterable[Demand], pages_per_token: float) -> float:
    """The largest sum of pages over time: just before each end, those that are still there have grown until then.

    Source: the idea of LightLLM's past-future scheduler (arXiv 2507.10150).

    Args:
        demands: one per sequence.
        pages_per_token: pages that a sequence grows by with each token.
    """
    peak = num_pages = 0.0
    for count, demand in enumerate(sorted(demands, reverse=True), 1):
        num_pages += demand.num_pages
        peak = max(peak, num_pages + count * demand.remaining * pages_per_token)
    return peak
