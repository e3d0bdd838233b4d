"""`python openai_current.py BASE_URL MODEL`: what users of openai-python do, against a live server. Needs nothing but openai."""

import asyncio
import sys

import openai


def responses(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="Say hello.", instructions="You are brief.", max_output_tokens=12, temperature=0)
    assert first.output_text
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert [item.content[0].text for item in client.responses.input_items.list(first.id)] == ["Say hello."]
    second = client.responses.create(model=model, input="Again.", previous_response_id=first.id, max_output_tokens=8, temperature=0)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > 20

    with client.responses.stream(
        model=model, input="Say hello.", instructions="You are brief.", max_output_tokens=12, temperature=0
    ) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == first.output_text

    with client.responses.create(model=model, input="Tell a long story.", max_output_tokens=400, stream=True) as events:
        kinds = []
        for event in events:
            kinds.append(event.type)
            if event.type == "response.created":
                response_id = event.response.id
            if kinds.count("response.output_text.delta") == 3 and event.type == "response.output_text.delta":
                assert client.responses.cancel(response_id).status == "cancelled"
    assert event.type == "response.incomplete"
    assert event.response.status == "cancelled"
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("it is still there")


def main(base_url: str, model: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="EMPTY", max_retries=0)
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Say hello."}]

    chat = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=12, temperature=0, seed=1)
    text = chat.choices[0].message.content
    assert text
    assert chat.choices[0].finish_reason in ("stop", "length")
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens

    stream = client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens

    with client.chat.completions.stream(model=model, messages=messages, max_completion_tokens=12, temperature=0) as events:
        kinds = {event.type for event in events}
        snapshot = events.current_completion_snapshot
    assert snapshot.choices[0].message.content == text
    assert {"chunk", "content.delta", "content.done"} <= kinds

    openai.api_key, openai.base_url = "EMPTY", f"{base_url}/"
    assert openai.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0).choices[0].message.content == text

    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=messages, max_completion_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse()._request_id == "mine-1"

    told = client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=3, temperature=0, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.index for choice in told.choices] == [0, 1]
    assert all(len(entry.top_logprobs) == 2 for entry in told.choices[0].logprobs.content)

    completion = client.completions.create(model=model, prompt=["One, two,", "A, B,"], max_tokens=5, temperature=0, logprobs=1)
    assert len(completion.choices) == 2
    assert completion.choices[0].logprobs.tokens
    pieces = list(client.completions.create(model=model, prompt="One, two,", max_tokens=5, temperature=0, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == completion.choices[0].text

    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    for wrong, kind in (({"model": "nobody"}, openai.NotFoundError), ({"max_completion_tokens": -1}, openai.BadRequestError)):
        try:
            client.chat.completions.create(**{"model": model, "messages": messages, **wrong})
        except kind as error:
            assert error.param == next(iter(wrong))
            assert error.body["message"]
        else:
            raise AssertionError(f"{wrong} was taken")

    responses(client, model)
    vectors = client.embeddings.create(model=model, input=["A cat.", "A kitten.", "The tax form."])
    assert [item.index for item in vectors.data] == [0, 1, 2]
    plain = client.embeddings.create(model=model, input="A cat.", encoding_format="float").data[0].embedding
    assert max(abs(one - two) for one, two in zip(vectors.data[0].embedding, plain, strict=True)) < 1e-4
    assert abs(sum(number * number for number in plain) - 1) < 1e-3

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="EMPTY", max_retries=0) as many:
            asking = [
                many.chat.completions.create(model=model, messages=messages, max_completion_tokens=12, temperature=0) for _ in range(4)
            ]
            answers = await asyncio.gather(*asking)
            assert {answer.choices[0].message.content for answer in answers} == {text}
            streamed = ""
            async for chunk in await many.chat.completions.create(
                model=model, messages=messages, max_completion_tokens=12, temperature=0, stream=True
            ):
                streamed += chunk.choices[0].delta.content or ""
            assert streamed == text

    asyncio.run(ask())
    print("passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
