"""POST /v1/completions: prompts of every form, several at once, echoes, log-probabilities, and the fields that both endpoints share."""

from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.tokenizer import Tokenizer
from tests.server.live import LiveServer, live_server

pytestmark = pytest.mark.jax


def test_prompts_of_every_form(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"prompt": "hello"}).json["tokens"]
    answer = server.complete("hello").text
    for prompt in (["hello"], ids, [ids]):
        assert server.complete(prompt).texts == [answer]


def test_several_prompts_and_samples_come_in_order(server: LiveServer) -> None:
    alone = [server.complete(prompt).text for prompt in ("one", "two", "three")]
    for is_streamed in (False, True):
        reply = server.complete(["one", "two", "three"], n=2, stream=is_streamed)
        assert len(reply.texts) == 6
        assert reply.texts[::2] == alone
    usage = server.complete(["one", "two", "three"], n=2).json["usage"]
    assert usage["completion_tokens"] == 6 * 8
    assert usage["prompt_tokens"] == sum(server.complete(prompt).json["usage"]["prompt_tokens"] for prompt in ("one", "two", "three"))


def test_sixteen_tokens_unless_asked_for_more(server: LiveServer) -> None:
    assert server.complete("length", max_tokens=None).json["usage"]["completion_tokens"] == 16
    assert server.complete("x" * 500, max_tokens=None).json["usage"]["completion_tokens"] == 12


def test_a_chat_runs_to_the_end_of_the_context(server: LiveServer) -> None:
    usage = server.chat("length", max_tokens=None).json["usage"]
    assert usage["total_tokens"] == 512


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("prompt", ["say", [70, 71, 72], ["a", "b"]])
def test_echo_puts_the_prompt_first(server: LiveServer, prompt: Any, is_streamed: bool) -> None:
    plain, echoed = server.complete(prompt, stream=is_streamed), server.complete(prompt, echo=True, stream=is_streamed)
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        prompt = server.post("/detokenize", {"tokens": prompt}).json["prompt"]
    begins = prompt if isinstance(prompt, list) else [prompt]
    assert echoed.texts == [begin + text for begin, text in zip(begins, plain.texts, strict=True)]


def test_the_length_that_was_asked_for_has_to_fit(server: LiveServer) -> None:
    """O-21, with a context of 512."""
    for length, max_tokens, status in ((510, 2, 200), (510, 3, 400), (511, 1, 200), (511, None, 200), (512, None, 400), (512, 1, 400)):
        reply = server.complete([5] * length, max_tokens=max_tokens)
        assert reply.status == status, (length, max_tokens)
        if status == 400:
            assert reply.error["code"] == "context_length_exceeded"
            assert "512" in reply.error["message"]
    assert server.complete([5] * 2048).status == 400
    for field in ("max_tokens", "max_completion_tokens"):
        reply = server.chat("x", **{"max_tokens": None, field: 600})
        assert (reply.status, reply.error["param"]) == (400, field)
    for wrong in (0, -1, 2**31, 1.5, "8", True):
        reply = server.complete("x", max_tokens=wrong)
        assert (reply.status, reply.error["param"]) == (400, "max_tokens"), wrong


def test_log_probabilities_of_both_formats_agree(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"messages": [{"role": "user", "content": "p"}]}).json["tokens"]
    chat = server.chat("p", logprobs=True, top_logprobs=3).json["choices"][0]
    text = server.complete(ids, logprobs=3).json["choices"][0]
    assert chat["message"]["content"] == text["text"]
    content, lists = chat["logprobs"]["content"], text["logprobs"]
    assert [entry["token"] for entry in content] == lists["tokens"]
    assert [entry["logprob"] for entry in content] == lists["token_logprobs"]
    for entry, top, token in zip(content, lists["top_logprobs"], lists["tokens"], strict=True):
        assert {one["token"]: one["logprob"] for one in entry["top_logprobs"]} == top
        assert len(top) == 3
        assert token in top
        assert [one["logprob"] for one in entry["top_logprobs"]] == sorted((one["logprob"] for one in entry["top_logprobs"]), reverse=True)
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        assert text["text"][offset:].startswith(token)
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text["text"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_with_log_probabilities_tells_the_prompt_as_well(server: LiveServer, is_streamed: bool, n: int) -> None:
    """O-10, O-11: entries for prompt and answer, the first of them null; offsets into the whole text."""
    prompt = "hello two words the end"
    ids = server.post("/tokenize", {"prompt": prompt}).json["tokens"]
    reply = server.complete(prompt, echo=True, logprobs=2, n=n, stream=is_streamed)
    found: dict[int, dict[str, Any]] = {}
    for body in reply.json if is_streamed else [reply.json]:
        for choice in body["choices"]:
            lists = found.setdefault(choice["index"], {name: [] for name in choice["logprobs"]})
            for name, entries in choice["logprobs"].items():
                lists[name] += entries
    plain = server.complete(prompt, logprobs=2, n=n).json["choices"]
    for index in range(n):
        text, lists = reply.texts[index], found[index]
        assert text == prompt + plain[index]["text"]
        assert {len(entries) for entries in lists.values()} == {len(ids) + 8}
        assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
        assert None not in lists["token_logprobs"][1:]
        assert all(token in top for token, top in zip(lists["tokens"][1:], lists["top_logprobs"][1:], strict=True))
        assert "".join(lists["tokens"]) == text
        for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
            assert text[offset:].startswith(token)
        assert lists["token_logprobs"][len(ids) :] == plain[index]["logprobs"]["token_logprobs"]


def test_a_prompt_alone_is_told_without_an_answer(server: LiveServer) -> None:
    for is_streamed in (False, True):
        alone = server.complete(["hello two words", "x"], echo=True, max_tokens=0, stream=is_streamed)
        assert (alone.status, alone.texts) == (200, ["hello two words", "x"])
        assert b'"logprobs":{' not in alone.content
        assert b'"prompt_logprobs"' not in alone.content
    reply = server.complete("hello two words", echo=True, logprobs=1, max_tokens=0)
    (choice,) = reply.json["choices"]
    assert (choice["text"], choice["finish_reason"], reply.json["usage"]["completion_tokens"]) == ("hello two words", "length", 0)
    assert choice["logprobs"]["tokens"] == ["hello", " two", " words"]
    assert choice["logprobs"] == {
        name: entries[:3]
        for name, entries in server.complete("hello two words", echo=True, logprobs=1, max_tokens=1).json["choices"][0]["logprobs"].items()
    }
    for fields in ({}, {"logprobs": 1}):
        assert server.complete("x", max_tokens=0, **fields).error["param"] == "max_tokens"


def test_all_ways_to_echo_and_tell(server: LiveServer) -> None:
    for echo in (None, False, True):
        for logprobs in (None, 0, 1):
            for is_streamed in (False, True):
                reply = server.complete("all ways", echo=echo, logprobs=logprobs, stream=is_streamed)
                assert reply.status == 200
                assert reply.text.startswith("all ways") == bool(echo)


def test_log_probabilities_of_prompts_in_vllms_format(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"prompt": "hello two words"}).json["tokens"]
    told = server.complete(ids, prompt_logprobs=1).json["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    for token_id, entry in zip(ids[1:], told[1:], strict=True):
        assert next(iter(entry)) == str(token_id)
        assert len(entry) == 2
        assert entry[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}
    chat = server.chat("x", prompt_logprobs=0).json
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    for ask in (server.chat, server.complete):
        assert ask("x", prompt_logprobs=1, stream=True).error["param"] == "prompt_logprobs"


def test_a_chosen_token_that_is_not_among_the_likeliest_is_told_too(server: LiveServer) -> None:
    """A bias chooses another token than the model would."""
    reply = server.complete("bias", max_tokens=2, logprobs=1, logit_bias={"70": 100})
    lists = reply.json["choices"][0]["logprobs"]
    assert lists["tokens"] == ["C", "C"]
    assert all(len(top) == 2 and top["C"] == min(top.values()) for top in lists["top_logprobs"])
    chat = server.chat("bias", max_tokens=2, logprobs=True, top_logprobs=1, logit_bias={"70": 100}).json["choices"][0]["logprobs"]
    assert [[one["token"] == "C" for one in entry["top_logprobs"]] for entry in chat["content"]] == [[False], [False]]
    none = server.chat("bias", max_tokens=2, logprobs=True).json["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in none["content"]] == [[], []]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tokens_by_their_ids(server: LiveServer, is_streamed: bool) -> None:
    reply = server.complete("ids", logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True, stream=is_streamed)
    choices = [choice for body in (reply.json if is_streamed else [reply.json]) for choice in body["choices"]]
    ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == [f"token_id:{token_id}" for token_id in ids]
    assert server.post("/detokenize", {"tokens": ids}).json["prompt"] == reply.text
    assert choices[0]["prompt_token_ids"] == server.post("/tokenize", {"prompt": "ids"}).json["tokens"]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


def test_offsets_of_a_stream_are_those_of_the_whole(server: LiveServer) -> None:
    whole = server.complete("o", logprobs=1).json["choices"][0]["logprobs"]
    streamed = [choice["logprobs"] for chunk in server.complete("o", logprobs=1, stream=True).json for choice in chunk["choices"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for piece in streamed for entry in piece[name]] == whole[name]


def test_stops_and_their_reasons(server: LiveServer) -> None:
    text = server.complete("stop here", max_tokens=12).text
    reply = server.complete("stop here", max_tokens=12, stop=[text[4:6]])
    (choice,) = reply.json["choices"]
    cut = text[: text.index(text[4:6])]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", text[4:6])
    kept = server.complete("stop here", max_tokens=12, stop=text[4:6], include_stop_str_in_output=True)
    assert kept.text == cut + text[4:6]
    ids = server.complete("stop here", max_tokens=12, return_token_ids=True).json["choices"][0]["token_ids"]
    by_id = server.complete("stop here", max_tokens=12, stop_token_ids=[ids[3]]).json["choices"][0]
    assert (by_id["text"], by_id["stop_reason"]) == (text[: ids.index(ids[3])], ids[3])
    assert server.complete("stop here", max_tokens=12, stop=[]).text == text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/score"])
def test_a_tenant_of_another_salt_finds_nothing_and_computes_as_much(chat_tokenizer: Tokenizer, path: str) -> None:
    """What would be told by time (CVE-2025-46570): steps, tokens and scheduled work are those of the first tenant, whoever asked before."""
    text = "two words and more of them " * 8
    given: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        "/v1/responses": {"input": text, "max_output_tokens": 1},
        "/v1/score": {"prompt": text, "continuation": "x"},
    }

    with live_server(chat_tokenizer) as server:

        def work(salt: str | None) -> tuple[list[tuple[int, ...]], list[int]]:
            """Tokens of each step that one request takes, and what it found in the cache."""
            num_steps, num_scheduled = len(server.log.of(events.StepFinished)), len(server.log.of(events.RequestScheduled))
            assert server.post(path, {**given[path], "temperature": 0} | ({} if salt is None else {"cache_salt": salt})).status == 200
            server.after_check()
            steps = [(step.num_tokens, step.num_prefill_tokens, step.num_seqs) for step in server.log.of(events.StepFinished)[num_steps:]]
            return steps, [event.num_cached_tokens for event in server.log.of(events.RequestScheduled)[num_scheduled:]]

        first = work("first tenant")
        assert first[1] == [0]
        assert sum(tokens for tokens, _, _ in first[0]) > 100
        assert work("second tenant") == first, "the second tenant sees that somebody has asked this before"
        assert work(None) == first, "who has no salt sees it"
        for salt in ("first tenant", "second tenant", None):
            again = work(salt)
            assert again[1][0] >= 96, "the salt's own pages are shared"
            assert sum(tokens for tokens, _, _ in again[0]) < sum(tokens for tokens, _, _ in first[0])
        usage = server.post(path, {**given[path], "cache_salt": "a third"}).json["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {"cached_tokens": 0}
        assert details["cached_tokens"] == 0


def test_cached_tokens_are_told_and_a_salt_keeps_them_apart(server: LiveServer) -> None:
    def cached(**fields: Any) -> int:
        return int(server.complete([9] * 100, **fields).json["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() == 96
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") == 96
    streamed = server.complete([9] * 100, stream=True, stream_options={"include_usage": True}).json[-1]["usage"]
    assert streamed["prompt_tokens_details"]["cached_tokens"] == 96


def test_running_counts_in_every_event(server: LiveServer) -> None:
    reply = server.complete("count", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in reply.json]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 8


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_timings_on_request(server: LiveServer, fields: dict[str, Any]) -> None:
    for ask in (server.complete, server.chat):
        assert "timings" not in (ask("t", **fields).json[-1] if fields else ask("t").json)
        reply = ask("t", timings=True, **fields)
        bodies = reply.json if reply.is_stream else [reply.json]
        timings = bodies[-1]["timings"]
        assert [name for body in bodies[:-1] for name in body if name == "timings"] == []
        assert timings["predicted_n"] == 8
        assert timings["prompt_n"] >= timings["cache_n"] >= 0
        assert timings["prompt_ms"] > 0
        assert timings["predicted_ms"] > 0
        assert timings["queue_ms"] >= 0


def test_prompts_are_cut_at_their_beginning(server: LiveServer) -> None:
    assert server.complete([*range(5, 90)], truncate_prompt_tokens=4).text == server.complete([86, 87, 88, 89]).text
    assert server.complete([5] * 900, truncate_prompt_tokens=-1, max_tokens=12).json["usage"]["prompt_tokens"] == 500
    assert server.complete("x", truncate_prompt_tokens=0).error["param"] == "truncate_prompt_tokens"


def test_seeds_and_samples(server: LiveServer) -> None:
    one, two = (server.complete("seed", temperature=1, seed=5, n=3).texts for _ in range(2))
    assert one == two


def test_words_and_ids_that_may_not_come(server: LiveServer) -> None:
    ids = server.complete("ban", return_token_ids=True).json["choices"][0]["token_ids"]
    assert ids[0] not in server.complete("ban", return_token_ids=True, logit_bias={str(ids[0]): -100}).json["choices"][0]["token_ids"]
    assert set(server.complete("ban", allowed_token_ids=[70, 71]).text) <= {"C", "D"}
    letter = server.complete("ban", max_tokens=1).text
    assert letter not in server.complete("ban", bad_words=[letter], max_tokens=1).text
