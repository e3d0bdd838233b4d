"""`python openai_retries.py BASE_URL`: one request that fails, with two retries allowed; prints the status of the failure."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="EMPTY", max_retries=2)
try:
    client.chat.completions.create(
        model=sys.argv[2], messages=[{"role": "user", "content": "x"}], max_completion_tokens=int(sys.argv[3]), stream=False
    )
except openai.APIStatusError as error:
    print(error.status_code)
