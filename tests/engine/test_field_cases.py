"""Field cases of engines of this kind that had no test elsewhere, through `LLM` and `AsyncLLM`; docs/reliability.md has the list."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import ChatTemplateError, InvalidRequestError
from jaxpaged.llm import LLM
from jaxpaged.mailbox import merge_deltas
from jaxpaged.request import FinishReason, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.start import Started
from jaxpaged.tokenizer import Tokenizer
from tests.engine.async_bench import run
from tests.engine.conftest import real_bench, tiny_bench
from tests.fakes import Canary, ScriptRunner
from tests.script import follow, follow_samples, free_talk
from tests.scripted_client import scripted_async_llm, scripted_llm
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def chat_prompt(template: str, messages: Any, **options: Any) -> str:
    """What `LLM.chat` sends to the engine, as a text."""
    tokenizer = byte_level(template)
    talk = free_talk(200, avoid=(0, 1, 2))
    with scripted_llm(ScriptRunner(talk, vocab=tokenizer.vocab_size), tokenizer) as llm:
        output = llm.chat(messages, GREEDY, **options)[0]
        assert len(output.outputs[0].token_ids) == 4
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def refusal(template: str, messages: Any, **options: Any) -> ChatTemplateError:
    """How `LLM.chat` refuses messages; another conversation is answered afterwards."""
    tokenizer = byte_level(template)
    with scripted_llm(ScriptRunner(free_talk(200, avoid=(2,)), vocab=tokenizer.vocab_size), tokenizer) as llm:
        with pytest.raises(ChatTemplateError) as caught:
            llm.chat(messages, GREEDY, **options)
        assert llm.chat([{"role": "user", "content": "Hello"}], GREEDY)[0].finished
    assert caught.value.http_status == 400
    return caught.value


ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{% if loop.index0 % 2 != (m.role != 'user') | int %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "sentence"),
    [(("system", "user"), "no system turn"), (("user", "user"), "roles must alternate"), (("assistant",), "alternate")],
)
def test_o06_a_template_that_refuses_a_role_is_a_bad_request(roles: tuple[str, ...], sentence: str) -> None:
    error = refusal(ALTERNATING, [{"role": role, "content": "x"} for role in roles])
    assert sentence in error.message
    assert error.param == "messages"


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}{% endfor %}"


def test_o07_content_as_a_list_of_parts() -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert chat_prompt(PLAIN, [{"role": "user", "content": parts}]) == chat_prompt(PLAIN, [{"role": "user", "content": "One.\nTwo."}])
    assert chat_prompt(PLAIN, [{"role": "user", "content": []}]) == "<user>"
    for part in ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, {"type": "surprise"}, 7, None):
        error = refusal(PLAIN, [{"role": "user", "content": [*parts, part]}])
        assert error.param == "messages[0].content[2]"
        assert "text parts only" in error.message


TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}){% endfor %}{% endif %}"
    "{{ m.content if m.content else '' }}{% endfor %}"
)


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
@pytest.mark.parametrize("has_id", [True, False])
@pytest.mark.parametrize("arguments", ['{"k": 2}', {"k": 2}])
def test_o08_tool_turns_of_a_client(content: dict[str, Any], has_id: bool, arguments: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "content": "4", **({"tool_call_id": "call_1"} if has_id else {})},
    ]
    assert chat_prompt(TOOLS, messages) == "<user>q<assistant>f(k=2;)<tool>4"


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", "nonsense", '{"k": "\\ud83d"}', "[" * 10_000])
def test_o08_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    error = refusal(TOOLS, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])
    assert error.param == "messages[0].tool_calls[0].function.arguments"


def test_o08_empty_arguments_are_none() -> None:
    call = {"function": {"name": "f", "arguments": ""}}
    assert chat_prompt(TOOLS, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == "<assistant>f()"


@pytest.mark.parametrize("prefix", ["Sure:\n", "Sure: ", "Sure:\t", "", "  "])
def test_o09_a_prefix_that_ends_in_white_space_is_continued(prefix: str) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</end>{% endfor %}"
    messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": prefix}]
    continued = chat_prompt(template, messages, add_generation_prompt=False, continue_final_message=True)
    # A template cannot trim what is continued but at its beginning, where its own words are.
    assert continued == "<user>Well?</end><assistant>" + (prefix.lstrip() if prefix.strip() else continued.split("<assistant>")[1])
    assert "</end>" not in continued.split("<assistant>")[1]
    error = refusal(template, messages, add_generation_prompt=True, continue_final_message=True)
    assert "both" in error.message


def test_o12_bytes_of_half_characters() -> None:
    """Each of the four bytes is a token: the bytes joined are the character, and every alternative is decoded alone."""
    tokenizer = byte_level()
    raw = "🧑ď".encode()
    ids = [3 + byte for byte in raw]
    with scripted_llm(ScriptRunner(follow({(5,): [*ids, 2]}), vocab=tokenizer.vocab_size), tokenizer) as llm:
        answer = llm.generate([[5]], SamplingParams(temperature=0.0, logprobs=3, max_tokens=20))[0].outputs[0]
    assert answer.text == "🧑ď"
    told = [next(iter(token.values())) for token in answer.logprobs or ()]
    assert b"".join(entry.token_bytes for entry in told[: len(raw)]) == raw
    for token in answer.logprobs or ():
        for token_id, entry in token.items():
            assert entry.token_bytes == (b"<|im_end|>" if token_id == 2 else tokenizer.token_bytes[token_id])
            assert entry.decoded_token == entry.token_bytes.decode(errors="replace")


@pytest.mark.real
def test_o14_small_temperatures_are_the_greedy_text(real: Started, real_canary: Canary) -> None:
    bench = real_bench(real, canary=real_canary, max_num_seqs=8)
    temperatures = (0, 1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
    ids = [bench.add("The weather in the mountains was", temperature=float(value), seed=3, max_tokens=8) for value in temperatures]
    bench.run()
    assert len({bench.text(request_id) for request_id in ids}) == 1
    assert len(set(bench.ids(ids[0]))) > 3
    bench.after_check()


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
ACCEPTED = {
    "temperature": {0, 1e-12, 1e6},
    "top_p": {1e-12},
    "min_p": {0, 1e-12},
    "repetition_penalty": {1e-12},
    "presence_penalty": {-1, 0, 1e-12},
    "frequency_penalty": {-1, 0, 1e-12},
}


@pytest.mark.parametrize("field", FLOATS)
def test_o17_extreme_numbers_are_answered_or_refused(tiny: Started, field: str) -> None:
    """Those that are taken give an answer; the others are refused by name, before anything runs."""
    bench = tiny_bench(tiny)
    for value in (-1, 0, 1e-12, 1e6, float("1e400"), math.nan, math.inf, -math.inf, "0.7"):
        fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 4, "ignore_eos": True, field: value}
        if value in ACCEPTED[field]:
            assert len(bench.ask([9, 10, 11], SamplingParams(**fields)).outputs[0].token_ids) == 4
            continue
        with pytest.raises(InvalidRequestError, match=field) as caught:
            SamplingParams(**fields)
        assert (caught.value.param, caught.value.http_status) == (field, 400)
    bench.after_check()


@pytest.mark.parametrize("key", ["384", "999999999", 999999999])
def test_o18_biases_beyond_the_vocabulary_are_refused_while_others_run(tiny: Started, key: Any) -> None:
    bench = tiny_bench(tiny)
    alone = bench.ask([5, 6], max_tokens=8, ignore_eos=True).outputs[0].token_ids
    others = [bench.add([5, 6], max_tokens=8, ignore_eos=True) for _ in range(4)]
    bench.step()
    with pytest.raises(InvalidRequestError, match=rf"logit_bias holds {key}"):
        bench.add([5, 6], logit_bias={key: 1.0})
    bench.run()
    assert [bench.ids(request_id) for request_id in others] == [alone] * 4
    bench.after_check()


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_o19_penalties_see_the_same_history_from_the_cache_and_without(tiny: Started, field: str) -> None:
    prompt = [20 + index % 9 for index in range(40)]
    # Biased so that the answer repeats itself and the prompt, or the penalties would change nothing.
    plain: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logit_bias": dict.fromkeys(range(20, 29), 5.0)}
    asked = {**plain, field: 3.0 if field == "repetition_penalty" else 1.3}
    cached, fresh, chunked = tiny_bench(tiny), tiny_bench(tiny, enable_prefix_caching=False), tiny_bench(tiny, max_num_batched_tokens=16)
    answers = [cached.ask(prompt, **asked) for _ in range(3)]
    assert [answer.num_cached_tokens for answer in answers] == [0, 32, 32]
    answers += [fresh.ask(prompt, **asked), chunked.ask(prompt, **asked)]
    preempted = cached.add(prompt, **asked)
    for _ in range(5):
        cached.step()
    cached.evict()
    assert cached.engine.scheduler.num_running == 0
    cached.run()
    ids = [answer.outputs[0].token_ids for answer in [*answers, cached.last[preempted]]]
    assert ids == [ids[0]] * len(ids)
    assert ids[0] != fresh.ask(prompt, **plain).outputs[0].token_ids


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_o22_every_choice_comes_with_its_own_end(script_tokenizer: Tokenizer, n: int, kind: RequestOutputKind) -> None:
    """Choices that end at different times, by end token, stop id and length: all there, each ended once, tokens as many as told."""
    samples = [[10 + index] * (1 + 3 * index % 7) + [2 if index % 3 else 200] for index in range(n)]
    runner = ScriptRunner(by_seed=follow_samples({(5, 6): samples}, seed=11), vocab=script_tokenizer.vocab_size, max_num_seqs=3)
    params = SamplingParams(n=n, seed=11, temperature=1.0, max_tokens=6, stop_token_ids=[200], output_kind=kind)

    async def work() -> list[RequestOutput]:
        with scripted_async_llm(runner, script_tokenizer) as client:
            return [output async for output in client.generate({"prompt_token_ids": [5, 6]}, params)]

    outputs = run(work)
    last = outputs[-1]
    if kind is RequestOutputKind.DELTA:
        ends = [answer.index for output in outputs for answer in output.outputs if answer.finish_reason is not None]
        assert sorted(ends) == list(range(n))
        last = outputs[0]
        for output in outputs[1:]:
            last = merge_deltas(last, output)
    assert [answer.index for answer in last.outputs] == list(range(n))
    assert [answer.token_ids for answer in last.outputs] == [sample[:6] for sample in samples]
    assert all(answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for answer in last.outputs)
    assert last.metrics.num_output_tokens == sum(len(answer.token_ids) for answer in last.outputs)
    assert last.prompt_token_ids == [5, 6]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.1}, {"allowed_token_ids": [9]}, {"logit_bias": {9: -100}}])
def test_o23_log_probabilities_are_numbers_that_json_can_write(tiny: Started, fields: dict[str, Any]) -> None:
    answer = tiny_bench(tiny).ask([5, 6], temperature=1.0, seed=1, max_tokens=4, logprobs=5, ignore_eos=True, **fields).outputs[0]
    text = msgspec.json.encode(answer.logprobs).decode()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in a body")

    json.loads(text, parse_constant=refuse)
    for token in answer.logprobs or ():
        assert all(-9999.0 <= entry.logprob <= 0 for entry in token.values())


def test_generation_config_fills_what_is_not_set_and_nothing_else(script_tokenizer: Tokenizer) -> None:
    """An unset or null field takes the model's value, a sent one never does, the neutral one included; no file gives neutral ones."""
    file = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.02, "repetition_penalty": 1.2, "max_tokens": 5, "do_sample": True}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    runner = ScriptRunner(follow({(5,): [10]}), vocab=script_tokenizer.vocab_size)
    with scripted_llm(runner, script_tokenizer, generation_config=file) as llm:
        intake = llm._intake
        for params in (None, SamplingParams(), SamplingParams(**dict.fromkeys(neutral))):
            taken = intake.request([5], params, arrival_s=0.0).params
            assert {name: getattr(taken, name) for name in neutral} == {name: file[name] for name in neutral}
        for name, value in neutral.items():
            taken = intake.request([5], SamplingParams(**{name: value}), arrival_s=0.0).params
            assert {each: getattr(taken, each) for each in neutral} == {**{each: file[each] for each in neutral}, name: value}
        # Lengths are no matter of the file: 16 for a completion, to the end of the context for a conversation.
        assert len(llm.generate([[5]], SamplingParams(temperature=0.0))[0].outputs[0].token_ids) == 16
    with scripted_llm(runner, script_tokenizer) as llm:
        assert {name: getattr(llm.get_default_sampling_params(), name) for name in neutral} == neutral


def test_a_conversation_without_parameters_runs_to_the_end_of_the_context(script_tokenizer: Tokenizer) -> None:
    tokenizer = byte_level(PLAIN)
    runner = ScriptRunner(lambda _: 70, vocab=tokenizer.vocab_size, max_model_len=64)
    with scripted_llm(runner, tokenizer) as llm:
        output = llm.chat([{"role": "user", "content": "Hello"}])[0]
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert len(llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3


def test_the_scripted_doors_are_the_real_ones(tmp_path: Path, script_tokenizer: Tokenizer) -> None:
    """So that what is shown here holds for engines of a model."""

    async def work() -> None:
        with scripted_async_llm(ScriptRunner(follow({(5,): [10]}), vocab=300), script_tokenizer) as client:
            assert type(client) is AsyncLLM
            await asyncio.sleep(0)

    run(work)
    with scripted_llm(ScriptRunner(follow({(5,): [10]}), vocab=300), script_tokenizer) as llm:
        assert type(llm) is LLM
