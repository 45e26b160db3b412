// Checks the Vercel AI SDK with its three providers. Packages: ai, @ai-sdk/openai, @ai-sdk/anthropic, @ai-sdk/openai-compatible, zod.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import {
  FORBIDDEN_MODEL, GATEWAY, KEY, MODEL, NO_BUDGET, SLOW, TOTALS, WRONG_KEY, checkTotals, failure, fault, run, settled,
} from "./checks.mjs";

const settings = { baseURL: `${GATEWAY}/v1`, apiKey: KEY, headers: { "x-session-id": "ai-sdk" } };
const openai = createOpenAI(settings);
const anthropic = createAnthropic(settings);
const compatible = createOpenAICompatible({ ...settings, name: "gateway", supportsStructuredOutputs: true, includeUsage: true });
const models = {
  "openai chat": openai.chat(MODEL),
  "openai responses": openai.responses(MODEL),
  compatible: compatible(MODEL),
  anthropic: anthropic(MODEL),
};
const prompt = "What is the weather?";
const said = "You said: What is the weather?";
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const refused = (more, status) =>
  failure(() => generateText({ model: compatible(MODEL), prompt, maxRetries: 0, ...more }), APICallError).then(
    (error) => (assert.equal(error.statusCode, status), JSON.parse(error.responseBody).error),
  );

const checks = {};
for (const [name, model] of Object.entries(models)) {
  checks[name] = async () => {
    const answer = await generateText({ model, prompt, maxRetries: 0 });
    assert.equal(answer.text, said);
    assert.ok(answer.usage.totalTokens > 0);
    checkTotals(answer.response.headers[TOTALS]);
  };
  checks[`${name} stream`] = async () => {
    const stream = streamText({ model, prompt, maxRetries: 0 });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, said);
    assert.ok((await stream.usage).totalTokens > 0);
  };
  checks[`${name} tools`] = async () => {
    const fields = { model, prompt, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };
    assert.match((await generateText(fields)).text, /^The tool answered: .*sunny in sample city/);
    assert.match(await streamText(fields).text, /^The tool answered: .*sunny in sample city/);
  };
  checks[`${name} structured`] = async () => {
    const output = Output.object({ schema: z.object({ city: z.string() }) });
    const answer = await generateText({ model, prompt, output, maxRetries: 0 });
    assert.deepEqual(answer.output, { city: "sample city" });
  };
}

await run({
  ...checks,
  embeddings: async () => {
    for (const model of [openai.embedding("mock-embedding"), compatible.embeddingModel("mock-embedding")]) {
      const { embeddings } = await embedMany({ model, values: ["one", "two"] });
      assert.deepEqual(embeddings.map((row) => row.length), [64, 64]);
    }
  },
  "errors 401": async () => {
    const error = await refused({ headers: { authorization: `Bearer ${WRONG_KEY}` } }, 401);
    assert.equal(error.code, "invalid_api_key");
  },
  "errors 404": async () => {
    assert.equal((await refused({ model: compatible(FORBIDDEN_MODEL) }, 404)).code, "model_not_found");
  },
  "errors 429": async () => void (await refused({ headers: fault(429) }, 429)),
  "errors 400": async () => {
    await refused({ headers: fault(400) }, 400);
    const error = await refused({ headers: { ...NO_BUDGET, "x-session-id": "poor" } }, 400);
    assert.equal(error.code, "budget_exhausted");
  },
  cancel: async () => {
    const leave = new AbortController();
    const stream = streamText({ model: compatible(MODEL), prompt, headers: SLOW, abortSignal: leave.signal });
    let seen = 0;
    for await (const _ of stream.textStream) if (++seen === 3) leave.abort();
    assert.ok(seen < 20, `${seen} pieces`);
    await settled();
  },
});
