"""`python openai_stream_errors.py BASE_URL MODEL`: a stream that fails on its way raises, and does not hang; prints the error's code."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="EMPTY", max_retries=0)
text = ""
try:
    for chunk in client.chat.completions.create(
        model=sys.argv[2], messages=[{"role": "user", "content": "x"}], max_completion_tokens=400, stream=True
    ):
        text += chunk.choices[0].delta.content or ""
except openai.APIError as error:
    assert text
    print(error.code)
