// `node client.js BASE_URL MODEL`: the AI SDK, with its provider for servers that speak OpenAI's protocol.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, streamText } from "ai";

const [baseURL, model] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "jaxpaged", baseURL, apiKey: "EMPTY", includeUsage: true });
const asked = {
  model: provider(model),
  system: "You are brief.",
  prompt: "Say hello.",
  maxOutputTokens: 12,
  temperature: 0,
  maxRetries: 0,
};

const whole = await generateText(asked);
assert.ok(whole.text);
assert.ok(["stop", "length"].includes(whole.finishReason));
assert.equal(whole.usage.totalTokens, whole.usage.inputTokens + whole.usage.outputTokens);

const stream = streamText({ ...asked, onError: () => {} });
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
assert.equal(streamed, whole.text);
assert.equal(await stream.finishReason, whole.finishReason);
assert.deepEqual((await stream.usage).outputTokens, whole.usage.outputTokens);

const completed = await generateText({ model: provider.completionModel(model), prompt: "One, two,", maxOutputTokens: 5, temperature: 0, maxRetries: 0 });
assert.ok(completed.text);

const { embeddings } = await embedMany({ model: provider.embeddingModel(model), values: ["A cat.", "The tax form."], maxRetries: 0 });
assert.equal(embeddings.length, 2);
assert.ok(Math.abs(embeddings[0].reduce((sum, number) => sum + number * number, 0) - 1) < 1e-3);

const stopping = new AbortController();
let pieces = 0;
for await (const piece of streamText({ ...asked, maxOutputTokens: 400, abortSignal: stopping.signal }).textStream) {
  if (++pieces === 2) stopping.abort();
}
assert.ok(pieces < 50);

await assert.rejects(
  generateText({ ...asked, model: provider("nobody") }),
  (error) => error instanceof APICallError && error.statusCode === 404 && !error.isRetryable,
);
console.log("passed");
