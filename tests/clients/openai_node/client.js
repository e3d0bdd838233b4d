// `node client.js BASE_URL MODEL`: what users of openai-node do, against a live server.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "EMPTY", maxRetries: 0 });
const messages = [
  { role: "system", content: "You are brief." },
  { role: "user", content: "Say hello." },
];
const asked = { model, messages, max_completion_tokens: 12, temperature: 0 };

const chat = await client.chat.completions.create(asked);
const text = chat.choices[0].message.content;
assert.ok(text);
assert.ok(["stop", "length"].includes(chat.choices[0].finish_reason));
assert.equal(chat.usage.total_tokens, chat.usage.prompt_tokens + chat.usage.completion_tokens);

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, chat.usage.completion_tokens);
assert.equal((await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message.content, text);

const leaving = await client.chat.completions.create({ ...asked, max_completion_tokens: 400, stream: true });
for await (const chunk of leaving) if (chunk.choices[0]?.delta.content) break;

const completion = await client.completions.create({ model, prompt: "One, two,", max_tokens: 5, temperature: 0, logprobs: 1 });
assert.equal(completion.choices[0].logprobs.tokens.join(""), completion.choices[0].text);

const listed = [];
for await (const card of client.models.list()) listed.push(card.id);
assert.deepEqual(listed, [model]);
assert.equal((await client.models.retrieve(model)).id, model);

const wanted = { model, input: "Say hello.", instructions: "You are brief.", max_output_tokens: 12, temperature: 0 };
const first = await client.responses.create(wanted);
assert.equal(first.output_text, text);
assert.equal((await client.responses.retrieve(first.id)).output_text, text);
const second = await client.responses.create({ ...wanted, input: "Again.", previous_response_id: first.id });
assert.equal(second.previous_response_id, first.id);
let delta = "";
const events = client.responses.stream(wanted).on("response.output_text.delta", (event) => { delta += event.delta; });
assert.equal((await events.finalResponse()).output_text, text);
assert.equal(delta, text);

const vectors = await client.embeddings.create({ model, input: ["A cat.", "The tax form."] });
const plain = await client.embeddings.create({ model, input: "A cat.", encoding_format: "float" });
assert.equal(vectors.data[0].embedding.length, plain.data[0].embedding.length);
assert.ok(vectors.data[0].embedding.every((number, place) => Math.abs(number - plain.data[0].embedding[place]) < 1e-4));

await assert.rejects(client.chat.completions.create({ ...asked, model: "nobody" }), OpenAI.NotFoundError);
await assert.rejects(
  client.chat.completions.create({ ...asked, max_completion_tokens: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "max_completion_tokens",
);
console.log("passed");
