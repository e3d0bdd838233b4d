"""How answers end and what comes out on the way: stop strings, stop ids, end tokens, limits, kinds of output."""

from pathlib import Path
from typing import Any

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import FinishReason, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import Bench, ScriptRunner, follow, free_talk
from tests.text.vocabularies import byte_level, id_of
from tests.tiny_engine import start_tiny
from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("in_flight")]

CANARY = (4, 4, 4)
PROMPT = (40, 41, 42)
EOS = 2


def bench(tokenizer: Tokenizer, answer: list[int], *, eos_token_ids: tuple[int, ...] = (EOS,)) -> Bench:
    """SCRIPT that answers `PROMPT` with these ids, and any other prompt with something of its own."""
    scripted, other = follow({PROMPT: answer}), free_talk(200, avoid=(0, 1, 2))

    def next_id(history: tuple[int, ...]) -> int:
        return scripted(history) if history[: len(PROMPT)] == PROMPT else other(history)

    runner = ScriptRunner(next_id, vocab=tokenizer.vocab_size + 8, page_size=4)
    return Bench(runner, tokenizer, eos_token_ids=eos_token_ids, canary_prompt=CANARY)


def spell(tokenizer: Tokenizer, *pieces: str | bytes) -> list[int]:
    """The id of each piece, then an end token."""
    return [*(id_of(tokenizer, piece) for piece in pieces), EOS]


def ask(bench: Bench, **fields: Any) -> RequestOutput:
    """The last output for `PROMPT`, after all three kinds of output and several intervals gave the same answer."""
    answers = []
    for kind in RequestOutputKind:
        for interval in (1,) if kind is RequestOutputKind.FINAL_ONLY else (1, 2, 3, 7):
            request_id = bench.add(PROMPT, output_kind=kind, stream_interval=interval, **fields)
            bench.run()
            outputs = bench.outputs[request_id]
            completions = [output.outputs[0] for output in outputs]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert [completion.finish_reason is None for completion in completions] == [True] * (len(outputs) - 1) + [False]
            last = completions[-1]
            if kind is RequestOutputKind.DELTA:
                text = "".join(completion.text for completion in completions)
                token_ids = [token_id for completion in completions for token_id in completion.token_ids]
                assert all(len(completion.token_ids) == interval for completion in completions[:-1])
            else:
                assert kind is RequestOutputKind.CUMULATIVE or len(outputs) == 1
                for before, after in zip(completions, completions[1:], strict=False):
                    assert after.text.startswith(before.text)
                    assert len(after.token_ids) - len(before.token_ids) == interval or after is last
                text, token_ids = last.text, last.token_ids
            answers.append((text, token_ids, last.finish_reason, last.stop_reason))
    assert all(answer == answers[0] for answer in answers), answers
    bench.after_check()
    return outputs[-1]


def test_o01_characters_spread_over_tokens_stream_whole(script_tokenizer: Tokenizer) -> None:
    text = "naïve – 東京タワー 🧑🏽‍🚀 👩‍👩‍👧 नमस्ते ď"
    answer = [3 + byte for byte in text.encode()]
    one = bench(script_tokenizer, [*answer, EOS])
    assert ask(one, max_tokens=200).outputs[0].text == text
    request_id = one.add(PROMPT, output_kind=RequestOutputKind.DELTA, max_tokens=200)
    one.run()
    assert not any("\ufffd" in delta for delta in one.deltas(request_id))
    for cut in range(1, 24):  # inside characters of 1, 2 and 3 bytes as well as between them
        request_id = one.add(PROMPT, output_kind=RequestOutputKind.DELTA, max_tokens=cut)
        one.run()
        deltas = one.deltas(request_id)
        assert "".join(deltas) == text.encode()[:cut].decode("utf-8", "replace")
        assert not any("\ufffd" in delta for delta in deltas[:-1])
        assert deltas[-1].count("\ufffd") <= 1
    one.after_check()


def test_o03_a_stop_string_that_ends_inside_a_token(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, spell(script_tokenizer, "pqr", "stuv", "wx"))
    cut = ask(one, stop=["st"]).outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("pqr", FinishReason.STOP, "st")
    assert len(cut.token_ids) == 2
    kept = ask(one, stop=["st"], include_stop_str_in_output=True).outputs[0]
    assert kept.text == "pqrst"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["4 5 6"], "0 1 2 3 ", "4 5 6"),
        (["4 5 X"], "0 1 2 3 4 5 6 7", None),
        (["4 5", "4 5 6"], "0 1 2 3 ", "4 5"),
        (["4 5 6", "4 5"], "0 1 2 3 ", "4 5"),
        (["5 6 7", "6"], "0 1 2 3 4 5 ", "6"),
        (["7"], "0 1 2 3 4 5 6 ", "7"),
        (["0"], "", "0"),
    ],
)
def test_o04_a_stop_string_longer_than_one_token(stop: list[str], text: str, reason: str | None) -> None:
    tokenizer = byte_level(words=())
    one = bench(tokenizer, spell(tokenizer, *"0 1 2 3 4 5 6 7"))
    answer = ask(one, stop=stop, max_tokens=100).outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, FinishReason.STOP, reason)


def test_a_stop_string_in_the_last_allowed_token_is_a_stop(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, spell(script_tokenizer, "pqr", "stuv", "wx"))
    answer = ask(one, stop=["uv"], max_tokens=2).outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("pqrst", FinishReason.STOP, "uv")


def test_text_that_may_begin_a_stop_string_comes_out_at_the_end(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, spell(script_tokenizer, "pqr", "stuv", "wx"))
    assert ask(one, stop=["wxyz"], max_tokens=100).outputs[0].text == "pqrstuvwx"
    assert ask(one, stop=["stuvw!"], max_tokens=2).outputs[0].text == "pqrstuv"


def test_min_tokens_passes_over_stop_strings_and_stop_ids(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, spell(script_tokenizer, "pqr", "st", "pqr", "st", "wx"))
    answer = ask(one, stop=["st"], min_tokens=3).outputs[0]
    assert (answer.text, answer.finish_reason) == ("pqrstpqr", FinishReason.STOP)
    stop_id = id_of(script_tokenizer, "st")
    answer = ask(one, stop_token_ids=[stop_id], min_tokens=3).outputs[0]
    # The second token may not be "st", and what is likeliest after it is the next id, "stu".
    assert (answer.text, answer.stop_reason) == ("pqrstupqr", stop_id)


def test_a_stop_id_ends_the_answer_and_is_not_shown(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, spell(script_tokenizer, "pqr", "stuv", "wx"))
    stop_id = id_of(script_tokenizer, "stuv")
    answer = ask(one, stop_token_ids=[stop_id]).outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("pqr", FinishReason.STOP, stop_id)
    request_id = one.add(PROMPT, stop_token_ids=[stop_id])
    one.run()
    assert one.ids(request_id) == [id_of(script_tokenizer, "pqr"), stop_id]
    assert ask(one, stop_token_ids=[stop_id], include_stop_str_in_output=True).outputs[0].text == "pqrstuv"
    # With end tokens ignored a stop id that is an end token still stops, and is named.
    answer = ask(one, stop_token_ids=[EOS], ignore_eos=True).outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("pqrstuvwx", FinishReason.STOP, EOS)


def test_o20_ignore_eos_covers_every_end_token(script_tokenizer: Tokenizer) -> None:
    second = id_of(script_tokenizer, "wx")
    word = id_of(script_tokenizer, "the")
    one = bench(script_tokenizer, [word, word, second, word, word, word, word, word, word, word, EOS], eos_token_ids=(EOS, second))
    answer = one.ask(PROMPT, max_tokens=10, ignore_eos=True).outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (10, FinishReason.LENGTH)
    answer = one.ask(PROMPT, max_tokens=10).outputs[0]
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([word, word, second], FinishReason.STOP, None)
    assert answer.text == "thethe"
    answer = one.ask(PROMPT, max_tokens=20, min_tokens=5).outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (11, FinishReason.STOP)
    one.after_check()


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, None, {2}), ([2, 77], None, {2, 77}), (None, [2, 77], {2, 77}), (2, [77, 78], {2, 77, 78}), (None, None, {2})],
    ids=["int", "list", "generation_config", "both", "absent"],
)
def test_o51_several_end_tokens(
    config_eos: int | list[int] | None, generation_eos: list[int] | None, expected: set[int], tmp_path: Path, programs: Path
) -> None:
    """As written in the model's files; absent everywhere, the tokenizer's own."""
    write_tiny_llama(tmp_path, eos_token_id=config_eos, generation_eos=generation_eos)
    started = start_tiny(tmp_path, programs=programs, token_buckets=(16,), max_num_batched_tokens=16)
    tokenizer, eos_token_ids = started.intake.tokenizer, started.intake.eos_token_ids
    started.engine.close()
    assert eos_token_ids == expected
    for token_id in expected:
        one = bench(tokenizer, [200, 201, token_id, 202], eos_token_ids=tuple(eos_token_ids))
        answer = one.ask(PROMPT, max_tokens=10).outputs[0]
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([200, 201, token_id], FinishReason.STOP, None)
        assert answer.text == tokenizer.decode([200, 201])
        one.after_check()


def test_o55_an_id_beyond_the_tokenizer_has_no_text(script_tokenizer: Tokenizer) -> None:
    """Were such an id to come, it decodes to nothing and the request goes on."""
    gap = script_tokenizer.vocab_size + 5
    word = id_of(script_tokenizer, "pqr")
    answer = ask(bench(script_tokenizer, [word, gap, word, EOS]), max_tokens=10).outputs[0]
    assert (answer.text, answer.finish_reason) == ("pqrpqr", FinishReason.STOP)


def test_without_detokenizing_there_are_ids_and_no_text(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, spell(script_tokenizer, "pqr", "stuv"))
    answer = one.ask(PROMPT, detokenize=False).outputs[0]
    assert (answer.text, len(answer.token_ids), answer.finish_reason) == ("", 3, FinishReason.STOP)
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    one.after_check()


def test_control_tokens_show_only_when_asked_for(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, [*spell(script_tokenizer, "pqr")[:1], 1, EOS])
    assert ask(one).outputs[0].text == "pqr"
    assert ask(one, skip_special_tokens=False).outputs[0].text == "pqr<|im_start|>"
    assert ask(one, skip_special_tokens=False, ignore_eos=True, max_tokens=3).outputs[0].text == "pqr<|im_start|><|im_end|>"
