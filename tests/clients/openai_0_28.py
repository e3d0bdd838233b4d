"""`python openai_0_28.py BASE_URL MODEL`: the calls of openai-python before 1.0, as articles of that time show them."""

import sys

import openai

openai.api_base = sys.argv[1]
openai.base_url = sys.argv[1] + "/"
openai.api_key = "EMPTY"
model = sys.argv[2]

answer = openai.ChatCompletion.create(
    model=model, messages=[{"role": "user", "content": "Hello! What is your name?"}], max_tokens=12, temperature=0
)
text = answer.choices[0].message.content
assert text
chunks = openai.ChatCompletion.create(
    model=model, messages=[{"role": "user", "content": "Hello! What is your name?"}], max_tokens=12, temperature=0, stream=True
)
assert "".join(chunk.choices[0].delta.get("content") or "" for chunk in chunks) == text
completion = openai.Completion.create(model=model, prompt="One, two,", max_tokens=5, temperature=0, logprobs=1)
assert completion.choices[0].text
assert len(completion.choices[0].logprobs.tokens) == 5
assert [card.id for card in openai.Model.list().data] == [model]
try:
    openai.ChatCompletion.create(model=model, messages=[], max_tokens=12)
except openai.error.InvalidRequestError as error:
    assert error.param == "messages"
else:
    raise AssertionError("no messages were taken")
print("passed")
