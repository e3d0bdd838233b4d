"""Incremental text: equal to whole decoding for every cut, never half a character, nothing held back without need."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.detokenizer import Detokenizer
from jaxpaged.errors import InvalidRequestError
from jaxpaged.token_bytes import TokenBytes
from jaxpaged.tokenizer import Tokenizer
from tests.text.vocabularies import SPACE, byte_level, id_of, sentencepiece, sentencepiece_backend

BYTES, PIECES = byte_level(), sentencepiece()
VOCABULARIES = {"byte_level": BYTES, "sentencepiece": PIECES}
FIELD_TEXT = "naïve – 東京タワー 🧑🏽‍🚀 👩‍👩‍👧 नमस्ते ď"


def in_steps(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def stream(tokenizer: Tokenizer, steps: Sequence[Sequence[int]], **options: object) -> tuple[list[str], Detokenizer]:
    """Deltas of each step and of the end, as an engine would send them."""
    detokenizer = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    deltas = []
    for step in steps:
        deltas.append(detokenizer.append(step))
        if detokenizer.stop_match is not None:
            break
    deltas.append(detokenizer.finish())
    assert detokenizer.text == "".join(deltas)
    return deltas, detokenizer


@pytest.fixture(params=VOCABULARIES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return VOCABULARIES[request.param]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_spread_over_tokens_arrive_whole(tokenizer: Tokenizer, size: int) -> None:
    """O-01."""
    ids = tokenizer.encode(FIELD_TEXT)
    assert len(ids) > len(FIELD_TEXT), "most characters here are several tokens"
    deltas, _ = stream(tokenizer, in_steps(ids, size))
    assert "".join(deltas) == tokenizer.decode(ids) == FIELD_TEXT
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_text_cut_inside_a_character_ends_with_one_replacement(tokenizer: Tokenizer, size: int, num_bytes: int) -> None:
    """O-01: as whole decoding has it, and only in the last delta."""
    ids = [*tokenizer.encode("ok"), *(3 + byte for byte in "🧑".encode()[:num_bytes])]
    deltas, _ = stream(tokenizer, in_steps(ids, size))
    assert deltas[-1] == "\ufffd"
    assert not any("\ufffd" in delta for delta in deltas[:-1])
    assert "".join(deltas) == tokenizer.decode(ids) == "ok\ufffd"


def test_a_character_is_shown_as_soon_as_it_is_complete(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    shown = [(detokenizer.append([3 + byte]), detokenizer.num_held_bytes) for byte in "a日🧑".encode()]
    assert shown == [("a", 0), ("", 1), ("", 2), ("日", 0), ("", 1), ("", 2), ("", 3), ("🧑", 0)]


def test_a_character_known_to_be_broken_is_not_waited_for(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.append([3 + byte]) for byte in b"\xe6\x97a\xff\xf0\x9f"]
    assert shown == ["", "", "\ufffda", "\ufffd", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_spaces_of_byte_level_vocabularies_are_kept() -> None:
    """O-02 a."""
    ids = [id_of(BYTES, " hello"), id_of(BYTES, " world")]
    for prompt in ([], [1], BYTES.encode("Say")):
        for size in (1, 2):
            deltas, _ = stream(BYTES, in_steps(ids, size), prompt_token_ids=prompt)
            assert "".join(deltas) == " hello world"


def test_the_first_space_of_sentencepiece_depends_on_what_comes_before() -> None:
    """O-02 b: for every cut into a first list and a second that continues it, the parts joined are the whole."""
    two, words, space = piece_ids()
    ids = [space, two, words]
    assert PIECES.decode(ids) == " two words"
    assert PIECES.decode([two, words]) == "two words"
    for sequence in (ids, [two, words], [two, space, words, space, space], [space, space, space]):
        for cut in range(len(sequence) + 1):
            first, second = sequence[:cut], sequence[cut:]
            deltas, _ = stream(PIECES, in_steps(second, 1), prompt_token_ids=first)
            assert PIECES.decode(first) + "".join(deltas) == PIECES.decode(sequence)


def piece_ids() -> tuple[int, int, int]:
    """Ids of `▁two`, `▁words` and `▁`."""
    backend = sentencepiece_backend()
    two, words, space = (backend.token_to_id(SPACE + piece) for piece in ("two", "words", ""))
    return two, words, space


@pytest.mark.parametrize(
    "prompt, skip, want",
    [
        ([], True, "two"),
        ([1], True, "two"),
        ([1], False, " two"),
        ([10**6], True, "two"),
        ([3 + ord("x")], True, " two"),
        ([1, 3 + ord("x"), 2], True, " two"),
    ],
)
def test_only_text_in_the_prompt_counts_as_coming_before(prompt: list[int], skip: bool, want: str) -> None:
    """A begin token that is not shown is no text (Hugging Face: decoding the begin token and the answer together drops the space)."""
    two, _, _ = piece_ids()
    deltas, _ = stream(PIECES, [[two]], prompt_token_ids=prompt, skip_special_tokens=skip)
    assert "".join(deltas) == want


def test_an_answer_does_not_complete_the_prompts_character(tokenizer: Tokenizer) -> None:
    prompt, answer = [3 + 0xE6, 3 + 0x97], [3 + 0xA5, 3 + ord("a")]
    deltas, _ = stream(tokenizer, in_steps(answer, 1), prompt_token_ids=prompt)
    assert "".join(deltas) == "\ufffda" == tokenizer.decode(answer)


def stop_case(pieces: Sequence[str], **options: object) -> list[tuple[str, str | None, int]]:
    """Text, stop and tokens taken for each step size."""
    ids = [id_of(BYTES, piece) for piece in pieces]
    results = []
    for size in range(1, len(ids) + 1):
        deltas, detokenizer = stream(BYTES, in_steps(ids, size), **options)
        results.append(("".join(deltas), detokenizer.stop_match, detokenizer.num_tokens))
    return results


@pytest.mark.parametrize("is_included, want", [(False, "pqr"), (True, "pqrst")])
def test_a_stop_string_that_ends_inside_a_token(is_included: bool, want: str) -> None:
    """O-03."""
    results = stop_case(["pqr", "stuv", "wx"], stop=["st"], include_stop=is_included)
    assert set(results) == {(want, "st", 2)}


COUNT = ["0 ", "1 ", "2 ", "3", " ", "4", " ", "5", " ", "6", " ", "7"]


@pytest.mark.parametrize(
    "stop, text, match, num_tokens",
    [
        (["4 5 6"], "0 1 2 3 ", "4 5 6", 10),
        (["4 5 X"], "0 1 2 3 4 5 6 7", None, 12),
        (["4 5", "4 5 6"], "0 1 2 3 ", "4 5", 8),
        (["4 5 6", "4 5"], "0 1 2 3 ", "4 5", 8),
        (["5 6", "4 5 6"], "0 1 2 3 ", "4 5 6", 10),
        (["4 5 6 7 8", "5"], "0 1 2 3 4 ", "5", 8),
        (["7"], "0 1 2 3 4 5 6 ", "7", 12),
        (["7 8"], "0 1 2 3 4 5 6 7", None, 12),
        (["0"], "", "0", 1),
    ],
)
def test_a_stop_string_over_several_tokens(stop: list[str], text: str, match: str | None, num_tokens: int) -> None:
    """O-04: nothing of a stop string is sent, nothing of an unfinished one is lost, whatever the steps."""
    assert set(stop_case(COUNT, stop=stop)) == {(text, match, num_tokens)}


def test_deltas_before_a_stop_never_show_its_beginning() -> None:
    ids = [id_of(BYTES, piece) for piece in COUNT]
    deltas, _ = stream(BYTES, in_steps(ids, 1), stop=["4 5 6"])
    assert [delta for delta in deltas if delta] == ["0 ", "1 ", "2 ", "3", " "]


def test_nothing_follows_a_stop() -> None:
    detokenizer = Detokenizer(BYTES, stop=["st"])
    assert detokenizer.append([id_of(BYTES, "pqr"), id_of(BYTES, "stuv")]) == "pqr"
    assert detokenizer.append([id_of(BYTES, "wx")]) == ""
    assert detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.num_tokens) == ("pqr", 2)


def test_stop_strings_wait_for_min_tokens() -> None:
    """As in vLLM: the text of the first `min_tokens` tokens takes no part in a match."""
    pieces = ["st", "op", "st", "op"]
    assert set(stop_case(pieces, stop=["st"], min_tokens=1)) == {("stop", "st", 3)}
    assert set(stop_case(pieces, stop=["opst"], min_tokens=2)) == {("stopstop", None, 4)}
    assert set(stop_case(pieces, stop=["stop"], min_tokens=4)) == {("stopstop", None, 4)}


def test_a_stop_string_of_broken_characters() -> None:
    """The end of the answer completes the character, and with it the stop string."""
    detokenizer = Detokenizer(BYTES, stop=["\ufffd"])
    assert detokenizer.append([3 + ord("a"), 3 + 0xE6]) == "a"
    assert detokenizer.finish() == ""
    assert (detokenizer.stop_match, detokenizer.text) == ("\ufffd", "a")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        Detokenizer(BYTES, stop=[""])


def test_control_tokens_are_shown_only_when_asked_for() -> None:
    """O-51: an end token is no text."""
    ids = [id_of(BYTES, "hello"), 2, id_of(BYTES, " world"), 1, BYTES.encode("<think>")[0]]
    for skip, want in ((True, "hello world<think>"), (False, "hello<|im_end|> world<|im_start|><think>")):
        for size in (1, 2, 5):
            deltas, _ = stream(BYTES, in_steps(ids, size), skip_special_tokens=skip)
            assert "".join(deltas) == want == BYTES.decode(ids, skip)


def test_a_control_token_inside_a_character_does_not_break_it() -> None:
    deltas, _ = stream(BYTES, [[3 + 0xE6], [2], [3 + 0x97], [3 + 0xA5]])
    assert deltas == ["", "", "", "日", ""]
    deltas, _ = stream(BYTES, [[3 + 0xE6], [2]], skip_special_tokens=False)
    assert deltas == ["", "\ufffd<|im_end|>", ""]


def test_ids_beyond_the_vocabulary_are_no_text(tokenizer: Tokenizer) -> None:
    """O-55."""
    ids = [*tokenizer.encode("ok"), tokenizer.vocab_size, tokenizer.vocab_size + 63, *tokenizer.encode("b")]
    deltas, _ = stream(tokenizer, in_steps(ids, 1))
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "".join(deltas).replace(" ", "") == "okb"


def id_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of all kinds, with many broken and unfinished characters."""
    of_bytes = st.sampled_from([3 + byte for byte in b"\x80\xbf\xc3\xe6\x97\xa5\xf0\x9f\xa7\x91\xed\xa0\xff\xc0 a"])
    others = st.integers(0, tokenizer.vocab_size + 5)
    return st.lists(st.one_of(of_bytes, others), max_size=20)


@st.composite
def answers(draw: st.DrawFn) -> tuple[Tokenizer, list[int], list[list[int]], bool]:
    tokenizer = VOCABULARIES[draw(st.sampled_from(sorted(VOCABULARIES)))]
    ids = draw(id_lists(tokenizer))
    edges = [0, *sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)))), len(ids)]
    steps = [ids[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    return tokenizer, ids, steps, draw(st.booleans())


@settings(max_examples=400, deadline=None)
@given(answer=answers())
def test_every_cut_gives_the_text_of_the_whole(answer: tuple[Tokenizer, list[int], list[list[int]], bool]) -> None:
    tokenizer, ids, steps, skip = answer
    whole = tokenizer.decode(ids, skip)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    shown = ""
    for step in steps:
        shown += detokenizer.append(step)
        assert whole.startswith(shown)
        assert detokenizer.num_held_bytes <= 3
    rest = detokenizer.finish()
    assert shown + rest == whole
    # Two only where Python waits for a third byte of what looks like half of a surrogate pair (ED A0 to ED BF).
    assert rest in ("", "\ufffd", "\ufffd\ufffd")


@settings(max_examples=400, deadline=None)
@given(
    answer=answers(),
    stop=st.lists(st.text(alphabet=" abtwo日\ufffd", min_size=1, max_size=4), min_size=1, max_size=3),
    is_included=st.booleans(),
)
def test_every_cut_stops_at_the_same_place(
    answer: tuple[Tokenizer, list[int], list[list[int]], bool], stop: list[str], is_included: bool
) -> None:
    """Against a search of the whole text for the stop string that is complete first (the longest of several)."""
    tokenizer, ids, steps, skip = answer
    whole = tokenizer.decode(ids, skip)
    ends = [(end, -len(s), s) for s in stop for end in range(len(s), len(whole) + 1) if whole[:end].endswith(s)]
    end, _, match = min(ends, default=(len(whole), 0, None))
    want = whole[:end] if match is None or is_included else whole[: end - len(match)]
    deltas, detokenizer = stream(tokenizer, steps, stop=stop, include_stop=is_included, skip_special_tokens=skip)
    assert ("".join(deltas), detokenizer.stop_match) == (want, match)


@settings(max_examples=200, deadline=None)
@given(answer=answers(), stop=st.lists(st.text(alphabet=" abtwo日", min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_more_is_held_back_than_needed(answer: tuple[Tokenizer, list[int], list[list[int]], bool], stop: list[str]) -> None:
    """At most 3 bytes, and the longest end of the text that is a proper beginning of a stop string."""
    tokenizer, ids, _, skip = answer
    detokenizer = Detokenizer(tokenizer, stop=stop, skip_special_tokens=skip)
    known = Detokenizer(tokenizer, skip_special_tokens=skip)
    for token_id in ids:
        detokenizer.append([token_id])
        known.append([token_id])
        if detokenizer.stop_match is not None:
            return
        beginnings = [size for s in stop for size in range(1, len(s)) if known.text.endswith(s[:size])]
        assert detokenizer.num_held_chars == max(beginnings, default=0) <= max(map(len, stop)) - 1
        assert detokenizer.num_held_bytes == known.num_held_bytes <= 3
        assert len(detokenizer.text) + detokenizer.num_held_chars == len(known.text)


class CountedBytes(TokenBytes):
    """Counts how many tokens were looked up."""

    num_lookups = 0

    def __getitem__(self, token_id: int) -> bytes:
        self.num_lookups += 1
        return super().__getitem__(token_id)


@pytest.mark.parametrize("stop", [(), ("never seen", "\n\n\n")])
@pytest.mark.parametrize("size", [1, 4])
def test_each_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch, stop: Sequence[str], size: int) -> None:
    """2,000 tokens cost 2,000 look-ups of one token each: neither the text nor a window of it is decoded again."""
    tokenizer = byte_level()
    counted = CountedBytes(tokenizer._backend, {})
    monkeypatch.setattr(tokenizer, "token_bytes", counted)
    monkeypatch.setattr(tokenizer, "decode", None)
    monkeypatch.setattr(tokenizer, "_backend", None)
    ids = [(7 * index) % 250 + 3 for index in range(2000)]
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=ids, stop=stop)
    num_of_prompt = counted.num_lookups
    assert num_of_prompt <= 1
    longest = 0
    for step in in_steps(ids, size):
        longest = max(longest, len(detokenizer.append(step)))
    assert counted.num_lookups - num_of_prompt == 2000
    assert longest <= 4 + max(map(len, stop), default=0) + size
