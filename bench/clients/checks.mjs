// Shared code of the Node scripts: the gateway's address, the report of a check, and the audit of totals.
import assert from "node:assert/strict";

const env = process.env;
export const GATEWAY = env.GATEWAY_URL ?? "http://127.0.0.1:8484";
const PROVIDER = env.PROVIDER_URL ?? "http://127.0.0.1:9100";
export const KEY = env.GATEWAY_KEY ?? "none";
export const ONCE_KEY = env.GATEWAY_ONCE_KEY ?? "none"; // can be used once per minute
const ADMIN_KEY = env.GATEWAY_ADMIN_KEY ?? "none";
export const WRONG_KEY = "not-a-key-of-this-gateway";

export const MODEL = "mock-small";
// The client key may not use the first model, so the gateway returns 404. The provider does not have the second.
export const FORBIDDEN_MODEL = "forbidden-model";
export const MISSING_MODEL = "missing-model";
export const TOTALS = "x-session-cumulative-token-usage";
// For the built-in provider: a stream that takes two seconds.
export const SLOW = { "x-mock": "chunks=40;interval=0.05" };
export const SLOW_CHUNKS = 40;
export const NO_BUDGET = { "x-session-budget-tokens": "1" };
export const fault = (status) => ({ "x-mock": `status=${status}` });

export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

async function get(url, key) {
  const answer = await fetch(url, { headers: key ? { authorization: `Bearer ${key}` } : {} });
  assert.equal(answer.status, 200, url);
  return answer.json();
}

// Returns the settled tokens of all sessions, the tokens that the provider billed, and the held tokens.
async function audit() {
  const { sessions } = await get(`${GATEWAY}/api/sessions?limit=1000`, ADMIN_KEY);
  const used = sessions.map((session) => session.cumulative_token_usage);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const settled = [sum(used.map((one) => one.input_tokens)), sum(used.map((one) => one.output_tokens))];
  const { total } = await get(`${PROVIDER}/__mock/billed`);
  return {
    settled,
    billed: [total.input_tokens, total.output_tokens],
    held: sum(sessions.map((session) => session.budget?.held ?? 0)),
  };
}

// Waits until the totals are equal and nothing is held; fails if that does not happen.
export async function settled() {
  const deadline = Date.now() + 20_000;
  for (;;) {
    const found = await audit();
    if (found.held === 0 && found.settled.join() === found.billed.join()) return;
    assert.ok(Date.now() < deadline, JSON.stringify(found));
    await new Promise((resume) => setTimeout(resume, 50));
  }
}

export function checkTotals(text) {
  assert.ok(text, `no ${TOTALS}`);
  const shown = JSON.parse(text);
  assert.ok(shown.totalTokens > 0 && shown.totalTokens === shown.promptTokens + shown.completionTokens, text);
}

// Returns the error that a call throws; it must be of this class.
export async function failure(call, kind) {
  try {
    await call();
  } catch (error) {
    assert.ok(error instanceof kind, `${error?.constructor?.name}: ${error}`);
    return error;
  }
  throw new assert.AssertionError({ message: `no ${kind.name}` });
}

// Runs each check and reports a line for it; the exit code is 1 if one failed. `{ "chat stream": async () => … }`
export async function run(checks) {
  let failed = false;
  for (const [check, work] of Object.entries(checks)) {
    try {
      await work();
      console.log(JSON.stringify({ check, ok: true }));
    } catch (error) {
      failed = true;
      console.error(error);
      const why = `${error?.name}: ${error?.message}`;
      console.log(JSON.stringify({ check, ok: false, why }));
    }
  }
  process.exit(failed ? 1 : 0);
}
