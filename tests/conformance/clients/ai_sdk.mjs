// Vercel's AI SDK: node ai_sdk.mjs URL KEY MODEL MODULES, where MODULES is the node_modules with `ai` and its providers.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [url, apiKey, model, modules] = process.argv.slice(2);
const from = createRequire(`${modules}/`);
const load = (name) => import(pathToFileURL(from.resolve(name)).href);
const { version } = JSON.parse(readFileSync(`${modules}/ai/package.json`, "utf8"));
const { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
globalThis.AI_SDK_LOG_WARNINGS = false;

const openai = createOpenAI({ baseURL: url, apiKey });
const models = {
  "openai-compatible": createOpenAICompatible({
    name: "rhizome", baseURL: url, apiKey, includeUsage: true, supportsStructuredOutputs: true,
  })(model),
  "openai chat": openai.chat(model),
  "openai responses": openai.responses(model),
  anthropic: createAnthropic({ baseURL: url, apiKey })(model),
};
const place = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] }, large: { type: "boolean" } },
  required: ["city", "large"],
  additionalProperties: false,
};
const weather = tool({
  description: "How it is there.",
  inputSchema: jsonSchema(place),
  execute: async ({ city }) => ({ city, degrees: 21 }),
});
const common = { temperature: 0, seed: 5, maxRetries: 0, onError: () => {} };

async function parts(result) {
  const seen = [];
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
    seen.push(part);
  }
  return seen;
}

const checks = {
  "a text, whole and streamed, with usage": async (model) => {
    const asked = { ...common, model, prompt: "What does len do?", maxOutputTokens: 8 };
    const whole = await generateText(asked);
    const streamed = streamText(asked);
    const text = (await parts(streamed)).filter((part) => part.type === "text-delta").map((part) => part.text).join("");
    assert.equal(text, whole.text);
    assert.equal(whole.usage.outputTokens, 8);
    assert.deepEqual((await streamed.usage).totalTokens, whole.usage.totalTokens);
    assert.equal(await streamed.finishReason, "length");
  },
  "an object by its schema, whole and streamed": async (model) => {
    const asked = { ...common, model, prompt: "Where?", schema: jsonSchema(place), maxOutputTokens: 400, temperature: 1 };
    assert.deepEqual(Object.keys((await generateObject(asked)).object), ["city", "large"]);
    const streamed = streamObject(asked);
    await parts(streamed);
    assert.deepEqual(Object.keys(await streamed.object), ["city", "large"]);
  },
  "a tool that must be called, whole and streamed, and the step after it": async (model) => {
    const asked = {
      ...common, model, prompt: "How is it in Oslo?", tools: { weather }, temperature: 1, maxOutputTokens: 400,
      // items that are kept on a server are referred to by their ids
      providerOptions: { openai: { store: false } },
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) =>
        stepNumber ? { toolChoice: "none" } : { toolChoice: { type: "tool", toolName: "weather" } },
    };
    const whole = await generateText(asked);
    const streamed = streamText(asked);
    const kinds = (await parts(streamed)).map((part) => part.type);
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) assert(kinds.includes(kind), kind);
    for (const [first, second] of [whole.steps, await streamed.steps]) {
      assert.equal(first.finishReason, "tool-calls");
      assert.deepEqual(first.toolResults.map((result) => result.output.degrees), [21]);
      assert(second.text);
    }
  },
};

let failed = 0;
for (const [title, check] of Object.entries(checks)) {
  const problems = [];
  for (const [provider, model] of Object.entries(models)) {
    await check(model).catch((error) => problems.push(`${provider}: ${error.message} ${error.responseBody ?? ""}`));
  }
  failed += problems.length > 0;
  const told = problems.join("; ").replace(/\s+/g, " ").slice(0, 400);
  console.log(problems.length ? `FAIL  ai ${version}  ${title}: ${told}` : `PASS  ai ${version}  ${title}`);
}
process.exit(failed ? 1 : 0);
