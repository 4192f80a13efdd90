// The official Node SDK of OpenAI: node openai_node.mjs URL KEY MODEL MODULE, where MODULE is the SDK's directory.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [url, apiKey, model, directory] = process.argv.slice(2);
const manifest = JSON.parse(readFileSync(`${directory}/package.json`, "utf8"));
const { default: OpenAI } = await import(pathToFileURL(`${directory}/index.mjs`).href);
const client = new OpenAI({ baseURL: url, apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "What does len do?" }];
const flags = {
  type: "object",
  properties: { stable: { type: "boolean" }, beta: { type: "boolean" } },
  required: ["stable", "beta"],
  additionalProperties: false,
};

const checks = {
  "models: list and retrieve": async () => {
    const found = [];
    for await (const entry of client.models.list()) found.push(entry.id);
    assert(found.includes(model));
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  "completions: whole and streamed": async () => {
    const body = { model, prompt: "The with", max_tokens: 12, seed: 2 };
    const whole = await client.completions.create(body);
    let text = "";
    for await (const chunk of await client.completions.create({ ...body, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, whole.choices[0].text);
    assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  },
  "chat: whole and streamed, usage, log probabilities": async () => {
    const body = { model, messages, max_completion_tokens: 12, seed: 2, logprobs: true, top_logprobs: 2 };
    const whole = await client.chat.completions.create(body);
    const stream = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
    const final = await stream.finalChatCompletion().catch(() => stream.currentChatCompletionSnapshot);
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
    assert.equal(whole.choices[0].logprobs.content[0].top_logprobs.length, 2);
    assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
  },
  "a stream that is aborted ends": async () => {
    const stream = await client.completions.create({ model, prompt: "The", max_tokens: 800, stream: true });
    for await (const chunk of stream) {
      assert(chunk.choices);
      stream.controller.abort();
      break;
    }
    await client.completions.create({ model, prompt: "The", max_tokens: 1 });
  },
  "errors: the SDK's own exceptions with param and code": async () => {
    const ask = (fields) => client.chat.completions.create({ model, messages, max_tokens: 2, ...fields });
    await assert.rejects(ask({ temperature: -1 }), (e) => e instanceof OpenAI.BadRequestError && e.param === "temperature");
    await assert.rejects(ask({ model: "none" }), (e) => e instanceof OpenAI.NotFoundError && e.code === "model_not_found");
    const stranger = new OpenAI({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },
  "structured output and forced tools": async () => {
    const response_format = { type: "json_schema", json_schema: { name: "flags", strict: true, schema: flags } };
    const answer = await client.chat.completions.create({ model, messages, response_format });
    assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)).sort(), ["beta", "stable"]);
    const tools = [{ type: "function", function: { name: "set", parameters: flags } }];
    const tool_choice = { type: "function", function: { name: "set" } };
    const stream = client.chat.completions.stream({ model, messages, tools, tool_choice });
    const call = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
    assert.equal(call.function.name, "set");
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ["beta", "stable"]);
  },
};

let failed = 0;
for (const [title, check] of Object.entries(checks)) {
  const begin = performance.now();
  try {
    await check();
    console.log(`PASS  openai-node ${manifest.version}  ${title} (${((performance.now() - begin) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL  openai-node ${manifest.version}  ${title}: ${String(error).replace(/\s+/g, " ").slice(0, 400)}`);
  }
}
process.exit(failed ? 1 : 0);
