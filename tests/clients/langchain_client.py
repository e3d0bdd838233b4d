"""`python langchain_client.py BASE_URL MODEL`: ChatOpenAI, OpenAI and OpenAIEmbeddings. Needs nothing but langchain-openai."""

import asyncio
import sys

import openai
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

base_url, model = sys.argv[1:]
where = {"model": model, "base_url": base_url, "api_key": "EMPTY", "max_retries": 0}
chat = ChatOpenAI(**where, temperature=0, max_tokens=12, stream_usage=True)
chain = ChatPromptTemplate.from_messages([("system", "You are brief."), ("human", "{question}")]) | chat
question = {"question": "Say hello."}

whole = chain.invoke(question)
assert whole.content
assert whole.response_metadata["finish_reason"] in ("stop", "length")
assert whole.usage_metadata["total_tokens"] == whole.usage_metadata["input_tokens"] + whole.usage_metadata["output_tokens"]

streamed = None
for chunk in chain.stream(question):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed.content == whole.content
assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]

answers = chain.batch([question] * 3)
assert [answer.content for answer in answers] == [whole.content] * 3
assert asyncio.run(chain.ainvoke(question)).content == whole.content
told = chat.bind(logprobs=True, top_logprobs=2).invoke("Say hello.")
assert len(told.response_metadata["logprobs"]["content"]) == told.usage_metadata["output_tokens"]
response = ChatOpenAI(**where, temperature=0, max_tokens=12, use_responses_api=True).invoke(
    [("system", "You are brief."), ("human", "Say hello.")]
)
assert response.text == whole.content

completion = OpenAI(**where, temperature=0, max_tokens=5)
assert completion.invoke("One, two,") == "".join(completion.stream("One, two,"))
vectors = OpenAIEmbeddings(**where, check_embedding_ctx_length=False).embed_documents(["A cat.", "A kitten.", "The tax form."])
assert len(vectors) == 3
assert abs(sum(number * number for number in vectors[0]) - 1) < 1e-3
try:
    ChatOpenAI(**{**where, "model": "nobody"}).invoke("Say hello.")
except openai.NotFoundError:
    print("passed")
