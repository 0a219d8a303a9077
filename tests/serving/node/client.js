// Calls the server at the address given with OpenAI's client for Node, and prints what came back as JSON.

import OpenAI, { BadRequestError } from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello there" }];
const seen = {};

seen.models = (await client.models.list()).data.map((found) => found.id);

const whole = await client.chat.completions.create({ model, messages, max_tokens: 12 });
seen.chat = whole.choices[0].message.content;
seen.usage = whole.usage;

const stream = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 12,
  stream: true,
  stream_options: { include_usage: true },
});
seen.chunks = [];
for await (const chunk of stream) {
  if (chunk.choices.length) seen.chunks.push(chunk.choices[0].delta.content ?? "");
  else seen.streamedUsage = chunk.usage;
}

const runner = client.chat.completions.stream({ model, messages, max_tokens: 12 });
seen.collected = (await runner.finalChatCompletion()).choices[0].message.content;

const completion = await client.completions.create({ model, prompt: ["One, two", [5, 6]], n: 2, max_tokens: 3 });
seen.completions = completion.choices.map((choice) => [choice.index, choice.text]);

const input = [[3, 4, 5], [7]];
seen.embeddings = (await client.embeddings.create({ model, input, dimensions: 2 })).data.map((made) => made.embedding);
seen.floats = (
  await client.embeddings.create({ model, input, dimensions: 2, encoding_format: "float" })
).data.map((made) => made.embedding);

try {
  await client.chat.completions.create({ model, messages, temperature: -1 });
} catch (error) {
  seen.error = [error instanceof BadRequestError, error.status, error.message];
}

const left = await client.completions.create({ model, prompt: [5, 6], max_tokens: 400, stream: true });
for await (const chunk of left) break;

console.log(JSON.stringify(seen));
