"""`python litellm_client.py BASE_URL MODEL`: litellm's `openai/` route, whole and streamed. Needs nothing but litellm."""

import asyncio
import sys

import litellm

base_url, name = sys.argv[1:]
model = f"openai/{name}"
messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Say hello."}]
where = {"model": model, "api_base": base_url, "api_key": "EMPTY", "max_retries": 0}
asked = {**where, "messages": messages, "max_tokens": 12, "temperature": 0}

whole = litellm.completion(**asked)
text = whole.choices[0].message.content
assert text
assert whole.choices[0].finish_reason in ("stop", "length")
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
built = litellm.stream_chunk_builder(chunks, messages=messages)
assert built.choices[0].message.content == text
assert built.usage.completion_tokens == whole.usage.completion_tokens

told = litellm.completion(**asked, logprobs=True, top_logprobs=2)
assert all(len(entry.top_logprobs) == 2 for entry in told.choices[0].logprobs.content)
plain = {**where, "model": f"text-completion-openai/{name}", "prompt": "One, two,", "max_tokens": 5, "temperature": 0}
completed = litellm.text_completion(**plain).choices[0].text
assert completed
assert "".join(piece.choices[0].text or "" for piece in litellm.text_completion(**plain, stream=True)) == completed
vectors = litellm.embedding(**where, input=["A cat.", "The tax form."], encoding_format="float")
assert len(vectors.data) == 2


async def ask() -> None:
    answer = await litellm.acompletion(**asked)
    assert answer.choices[0].message.content == text
    pieces = [chunk.choices[0].delta.content or "" async for chunk in await litellm.acompletion(**asked, stream=True)]
    assert "".join(pieces) == text


asyncio.run(ask())
try:
    litellm.completion(**{**asked, "max_tokens": -1})
except litellm.BadRequestError as error:
    assert "max_tokens" in str(error)
else:
    raise AssertionError("-1 tokens were taken")
print("passed")
