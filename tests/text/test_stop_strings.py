"""Stop strings in text that arrives in pieces, against a search of the whole text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.errors import InvalidRequestError
from jaxpaged.stop_strings import StopMatch, StopStrings

LETTERS = st.text(alphabet="ab日", max_size=24)
STOPS = st.lists(st.text(alphabet="ab日", min_size=1, max_size=5), min_size=1, max_size=5)


def first_match(text: str, stops: list[str]) -> StopMatch | None:
    """The definition, by trying every end."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return StopMatch(max(complete, key=len), end)
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    return max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)


@settings(max_examples=500, deadline=None)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=6))
def test_the_first_match_whatever_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    watch = StopStrings(stops)
    want = first_match(text, stops)
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for start, end in zip(edges, edges[1:], strict=False):
        found = watch.advance(text[start:end])
        if found is not None:
            assert want == StopMatch(found.stop, start + found.end)
            return
        assert watch.num_held_chars == longest_beginning(text[:end], stops)
    assert want is None


@pytest.mark.parametrize(
    "stops, text, want",
    [
        (["ab", "abc"], "xabc", StopMatch("ab", 3)),
        (["abcd", "bc"], "abcd", StopMatch("bc", 3)),
        (["bc", "abc"], "abc", StopMatch("abc", 3)),
        (["aab"], "aaab", StopMatch("aab", 4)),
        (["STOP"], "STOSTOP", StopMatch("STOP", 7)),
        (["\n\n"], "a\n\nb", StopMatch("\n\n", 3)),
    ],
)
def test_which_of_several_wins(stops: list[str], text: str, want: StopMatch) -> None:
    assert StopStrings(stops).advance(text) == want
    assert StopStrings(stops[::-1]).advance(text) == want


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        StopStrings(["a", ""])


def test_many_long_stop_strings_cost_no_more_per_character() -> None:
    """64 strings of 1,024 characters that all begin alike, and text that begins them again and again."""
    watch = StopStrings([f"{'a' * 1000}{index:024d}" for index in range(64)])
    started = time.process_time()
    for _ in range(200):
        assert watch.advance("a" * 999 + "b") is None
    assert watch.num_held_chars == 0
    assert time.process_time() - started < 5, "200,000 characters take 0.05 s; a search per stop string would take minutes"
