// Checks the official openai SDK for Node. Packages: openai, zod.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  FORBIDDEN_MODEL, GATEWAY, KEY, MISSING_MODEL, MODEL, NO_BUDGET, ONCE_KEY, SLOW, TOTALS, WEATHER_SCHEMA, WRONG_KEY,
  checkTotals, failure, fault, run, settled,
} from "./checks.mjs";

const client = (apiKey = KEY) =>
  new OpenAI({ baseURL: `${GATEWAY}/v1`, apiKey, maxRetries: 0, defaultHeaders: { "x-session-id": "openai-node" } });
const messages = [{ role: "user", content: "What is the weather?" }];
const said = "You said: What is the weather?";
const tool = { type: "function", function: { name: "weather", parameters: WEATHER_SCHEMA } };
const responsesTool = { type: "function", name: "weather", parameters: WEATHER_SCHEMA, strict: true };
const Weather = z.object({ city: z.string() });
const chat = (fields = {}, options = {}, key = KEY) =>
  client(key).chat.completions.create({ model: MODEL, messages, ...fields }, options);
const respond = (fields = {}, options = {}, key = KEY) =>
  client(key).responses.create({ model: MODEL, input: messages, ...fields }, options);
const poor = { headers: { ...NO_BUDGET, "x-session-id": "poor" } };

await run({
  chat: async () => {
    const answer = await chat();
    assert.equal(answer.choices[0].message.content, said);
    assert.ok(answer.usage.total_tokens > 0);
  },
  "chat stream": async () => {
    let text = "", usage = null;
    for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, said);
    assert.ok(usage.total_tokens > 0);
  },
  "chat tools": async () => {
    const first = (await chat({ tools: [tool] })).choices[0].message;
    const result = { role: "tool", tool_call_id: first.tool_calls[0].id, content: "sunny" };
    const second = await chat({ tools: [tool], messages: [...messages, first, result] });
    assert.equal(second.choices[0].message.content, "The tool answered: sunny");
  },
  "chat tools stream": async () => {
    const runner = client().chat.completions.stream({ model: MODEL, messages, tools: [tool] });
    const { tool_calls: calls } = (await runner.finalChatCompletion()).choices[0].message;
    assert.deepEqual(JSON.parse(calls[0].function.arguments), { city: "sample city" });
  },
  "chat structured": async () => {
    const format = zodResponseFormat(Weather, "weather");
    const answer = await client().chat.completions.parse({ model: MODEL, messages, response_format: format });
    assert.deepEqual(answer.choices[0].message.parsed, { city: "sample city" });
  },
  responses: async () => assert.equal((await respond()).output_text, said),
  "responses stream": async () => {
    let text = "", usage = null;
    for await (const event of await respond({ stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
      if (event.type === "response.completed") usage = event.response.usage;
    }
    assert.equal(text, said);
    assert.ok(usage.total_tokens > 0);
  },
  "responses tools": async () => {
    const first = await respond({ tools: [responsesTool] });
    const [call] = first.output;
    const result = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
    const second = await respond({ tools: [responsesTool], input: [...messages, call, result] });
    assert.equal(second.output_text, "The tool answered: sunny");
  },
  "responses background": async () => {
    let answer = await respond({ background: true });
    assert.equal(answer.status, "queued");
    while (["queued", "in_progress"].includes(answer.status)) answer = await client().responses.retrieve(answer.id);
    assert.equal(answer.output_text, said);
  },
  "responses websocket": async () => {
    const socket = new ResponsesWS(client(), { headers: { "x-session-id": "openai-node" } });
    try {
      const ended = async (fields) => {
        socket.send({ type: "response.create", model: MODEL, tools: [responsesTool], store: false, ...fields });
        for await (const event of socket) {
          if (event.type === "error") throw event.error;
          if (event.type === "message" && event.message.type === "response.completed") return event.message;
        }
      };
      const first = (await ended({ input: messages })).response;
      const result = { type: "function_call_output", call_id: first.output[0].call_id, output: "sunny" };
      const second = await ended({ input: [result], previous_response_id: first.id });
      assert.equal(second.response.output[0].content[0].text, "The tool answered: sunny");
      checkTotals(second.headers[TOTALS]);
    } finally {
      socket.close();
    }
    await settled();
  },
  "responses structured": async () => {
    const text = { format: zodTextFormat(Weather, "weather") };
    const answer = await client().responses.parse({ model: MODEL, input: messages, text });
    assert.deepEqual(answer.output_parsed, { city: "sample city" });
  },
  embeddings: async () => {
    const { data } = await client().embeddings.create({ model: "mock-embedding", input: ["one", "two"] });
    assert.deepEqual(data.map((row) => row.embedding.length), [64, 64]);
  },
  models: async () => {
    const names = [];
    for await (const model of client().models.list()) names.push(model.id);
    assert.ok(names.includes(MODEL));
  },
  headers: async () => {
    const whole = await client().chat.completions.create({ model: MODEL, messages }).withResponse();
    checkTotals(whole.response.headers.get(TOTALS));
    assert.equal(whole.response.headers.get("x-session-id"), "openai-node");
    const second = await client().responses.create({ model: MODEL, input: "hi" }).withResponse();
    checkTotals(second.response.headers.get(TOTALS));
  },
  "errors 401": async () => {
    for (const call of [chat, respond]) {
      const error = await failure(() => call({}, {}, WRONG_KEY), OpenAI.AuthenticationError);
      assert.equal(error.code, "invalid_api_key");
    }
  },
  "errors 404": async () => {
    for (const model of [FORBIDDEN_MODEL, MISSING_MODEL]) {
      const error = await failure(() => chat({ model }), OpenAI.NotFoundError);
      assert.equal(error.code, "model_not_found");
    }
  },
  "errors 429": async () => {
    await failure(() => chat({}, { headers: fault(429) }), OpenAI.RateLimitError);
    await chat({}, {}, ONCE_KEY);
    const error = await failure(() => chat({}, {}, ONCE_KEY), OpenAI.RateLimitError);
    assert.equal(error.code, "rate_limit_exceeded");
  },
  "errors 400": async () => {
    await failure(() => chat({}, { headers: fault(400) }), OpenAI.BadRequestError);
    for (const call of [chat, respond]) {
      const error = await failure(() => call({}, poor), OpenAI.BadRequestError);
      assert.equal(error.code, "budget_exhausted");
    }
  },
  cancel: async () => {
    let seen = 0;
    for await (const _ of await chat({ stream: true }, { headers: SLOW })) if (++seen === 4) break;
    assert.equal(seen, 4);
    await settled();
  },
  "cancel responses": async () => {
    const stream = await respond({ stream: true }, { headers: SLOW });
    for await (const event of stream) if (event.type === "response.output_text.delta") stream.controller.abort();
    await settled();
  },
});
