"""`python openai_tls.py MODEL CA_FILE`: a server with TLS and a key, where OPENAI_BASE_URL and OPENAI_API_KEY say. CA_FILE is trusted."""

import os
import sys

import openai

model, authority = sys.argv[1:]
asked = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 8, "temperature": 0}
try:
    openai.OpenAI(max_retries=0).chat.completions.create(**asked)
except openai.APIConnectionError as error:
    assert "CERTIFICATE_VERIFY_FAILED" in str(error.__cause__)
else:
    raise AssertionError("a certificate that nobody vouches for was taken")

os.environ["SSL_CERT_FILE"] = authority
client = openai.OpenAI(max_retries=0)
text = client.chat.completions.create(**asked).choices[0].message.content
assert text
chunks = client.chat.completions.create(**asked, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
assert [card.id for card in client.models.list()] == [model]
try:
    client.with_options(api_key="wrong").models.list()
except openai.AuthenticationError as error:
    assert error.code == "invalid_api_key"
    print("passed")
