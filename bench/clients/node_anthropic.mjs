// Checks the official Anthropic SDK for Node. Packages: @anthropic-ai/sdk, zod.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import {
  FORBIDDEN_MODEL, GATEWAY, KEY, MISSING_MODEL, MODEL, NO_BUDGET, ONCE_KEY, SLOW, TOTALS, WEATHER_SCHEMA, WRONG_KEY,
  checkTotals, failure, fault, run, settled,
} from "./checks.mjs";

const client = (apiKey = KEY) =>
  new Anthropic({ baseURL: GATEWAY, apiKey, maxRetries: 0, defaultHeaders: { "x-session-id": "anthropic-node" } });
const messages = [{ role: "user", content: "What is the weather?" }];
const said = "You said: What is the weather?";
const body = { model: MODEL, max_tokens: 100, messages };
const tools = [{ name: "weather", input_schema: WEATHER_SCHEMA }];
const create = (fields = {}, options = {}, key = KEY) => client(key).messages.create({ ...body, ...fields }, options);

await run({
  messages: async () => {
    const answer = await create();
    assert.equal(answer.content[0].text, said);
    assert.ok(answer.usage.input_tokens > 0);
  },
  "messages stream": async () => {
    const final = await client().messages.stream(body).finalMessage();
    assert.equal(final.content[0].text, said);
    assert.ok(final.usage.output_tokens > 0);
  },
  "messages tools": async () => {
    const first = await create({ tools });
    assert.equal(first.stop_reason, "tool_use");
    const result = { type: "tool_result", tool_use_id: first.content[0].id, content: "sunny" };
    const further = [...messages, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
    assert.equal((await create({ tools, messages: further })).content[0].text, "The tool answered: sunny");
  },
  "messages tools stream": async () => {
    const final = await client().messages.stream({ ...body, tools }).finalMessage();
    assert.deepEqual(final.content[0].input, { city: "sample city" });
  },
  "messages structured": async () => {
    const format = zodOutputFormat(z.object({ city: z.string() }));
    const answer = await client().messages.parse({ ...body, output_config: { format } });
    assert.deepEqual(answer.parsed_output, { city: "sample city" });
  },
  "count tokens": async () => {
    assert.ok((await client().messages.countTokens({ model: MODEL, messages })).input_tokens > 0);
  },
  models: async () => {
    const names = [];
    for await (const model of client().models.list()) names.push(model.id);
    assert.ok(names.includes(MODEL));
  },
  headers: async () => {
    const { response } = await client().messages.create(body).withResponse();
    checkTotals(response.headers.get(TOTALS));
    assert.equal(response.headers.get("x-session-id"), "anthropic-node");
  },
  "errors 401": async () => {
    await failure(() => create({}, {}, WRONG_KEY), Anthropic.AuthenticationError);
  },
  "errors 404": async () => {
    for (const model of [FORBIDDEN_MODEL, MISSING_MODEL]) {
      const error = await failure(() => create({ model }), Anthropic.NotFoundError);
      assert.equal(error.error.error.type, "not_found_error");
    }
  },
  "errors 429": async () => {
    await failure(() => create({}, { headers: fault(429) }), Anthropic.RateLimitError);
    await create({}, {}, ONCE_KEY);
    const error = await failure(() => create({}, {}, ONCE_KEY), Anthropic.RateLimitError);
    assert.equal(error.error.error.type, "rate_limit_error");
  },
  "errors 400": async () => {
    await failure(() => create({}, { headers: fault(400) }), Anthropic.BadRequestError);
    const poor = { headers: { ...NO_BUDGET, "x-session-id": "poor" } };
    const error = await failure(() => create({}, poor), Anthropic.BadRequestError);
    assert.equal(error.error.error.code, "budget_exhausted");
  },
  cancel: async () => {
    const stream = await create({ stream: true }, { headers: SLOW });
    for await (const event of stream) if (event.type === "content_block_delta") break;
    await settled();
  },
});
