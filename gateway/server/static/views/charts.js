/**
 * Draw the charts of a session: its calls, oldest first, by number or by time.
 * @module
 */
import { Chart } from "../chart.js";
import { choice, fill, h } from "../dom.js";
import { compact, many, milliseconds, number, percent, timeOf, usd } from "../format.js";

/** @typedef {import("../types.js").Call} Call */
/** @typedef {import("../types.js").Session} Session */

const AXES = /** @type {[string, string][]} */ ([
  ["calls", "By call"],
  ["time", "By time"],
]);

export class Charts {
  /** @param {(call: Call) => void} onPick */
  constructor(onPick) {
    this.onPick = onPick;
    this.axis = "calls";
    /** oldest first @type {Call[]} */
    this.calls = [];
    this.choice = choice("Horizontal axis", AXES, (name) => this.turn(name));
    this.strip = h("div", {});
    this.grid = h("div", { class: "charts" });
    this.element = h(
      "section",
      { "aria-label": "Over time" },
      h("div", { class: "title" }, h("h2", {}, "Over time"), this.choice.element),
      this.strip,
      this.grid,
    );
    /** @type {Record<string, Chart>} */
    this.charts = {};
    this.make();
  }

  make() {
    for (const chart of Object.values(this.charts)) chart.close();
    const time = this.axis === "time";
    const formatX = (/** @type {number} */ x) => (time ? timeOf(x) : `call ${number(x)}`);
    const common = {
      time,
      formatX,
      sync: "session",
      onPick: (/** @type {number} */ index) => this.calls[index] && this.onPick(this.calls[index]),
    };
    this.charts = {
      tokens: new Chart({
        ...common,
        title: "Tokens of each call",
        lines: [
          { label: "output", colour: "output", as: "bars", format: number },
          { label: "input", colour: "input", as: "bars", format: number },
          { label: "cached input", colour: "cached", as: "bars", format: number },
        ],
      }),
      total: new Chart({
        ...common,
        title: "Total tokens, and the budget",
        lines: [
          { label: "used by this session", colour: "input", filled: true, format: compact },
          { label: "now, with child sessions", colour: "received", dashed: true, format: compact },
          { label: "budget", colour: "limit", dashed: true, format: compact },
        ],
      }),
      context: new Chart({
        ...common,
        title: "Context: received and sent",
        lines: [
          { label: "received", colour: "received", filled: true, format: number },
          { label: "sent", colour: "input", filled: true, format: number },
          { label: "allowed", colour: "limit", dashed: true, format: number },
        ],
      }),
      cost: new Chart({
        ...common,
        title: "Cost of each call, and total cost",
        lines: [
          { label: "call", colour: "cost", as: "bars", format: usd, least: -6 },
          { label: "total", colour: "output", scale: "right", format: usd, least: -6 },
        ],
      }),
      cache: new Chart({
        ...common,
        title: "Input from the provider's cache",
        lines: [{ label: "share", colour: "cached", filled: true, format: (value) => percent(value), least: -2 }],
        range: [0, 1.05],
      }),
      time: new Chart({
        ...common,
        title: "Time of each call",
        lines: [
          { label: "total", colour: "received", as: "bars", format: milliseconds, least: -1 },
          { label: "first byte", colour: "input", as: "bars", format: milliseconds, least: -1 },
        ],
      }),
    };
    fill(
      this.grid,
      Object.values(this.charts).map((chart) => chart.element),
    );
    this.choice.press(this.axis);
  }

  /** @param {string} axis */
  turn(axis) {
    this.axis = axis;
    this.make();
    if (this.session) this.set(this.session, this.calls.toReversed());
  }

  /**
   * @param {Session} session
   * @param {Call[]} calls newest first
   */
  set(session, calls) {
    this.session = session;
    this.calls = calls.filter((call) => call.usage || call.context).reverse();
    this.element.hidden = this.calls.length === 0;
    if (!this.calls.length) return;
    // Number of earlier calls: the session counts calls with a usage.
    const before = Math.max(0, session.calls - this.calls.filter(({ usage }) => usage).length);
    const xs = this.calls.map((call, index) =>
      this.axis === "time" ? Date.parse(call.started_at) / 1000 : before + index + 1,
    );
    this.tokens(xs);
    this.totals(xs, session);
    this.context(xs);
    this.cache(xs);
    this.charts.time.set([
      xs,
      this.calls.map((call) => call.duration_ms),
      this.calls.map((call) => call.first_byte_ms),
    ]);
    fill(this.strip, strip(this.calls));
  }

  /** @param {number[]} xs */
  tokens(xs) {
    const of = (/** @type {(usage: import("../types.js").Usage) => number} */ get) =>
      this.calls.map(({ usage }) => (usage ? get(usage) : null));
    const input = of((usage) => usage.input_tokens);
    const cached = of((usage) => usage.cache_read_tokens);
    // Larger bars are drawn behind smaller ones, so that the visible part is the difference.
    const both = of((usage) => usage.input_tokens + usage.output_tokens);
    this.charts.tokens.set([xs, both, input, cached], [xs, of((usage) => usage.output_tokens), input, cached]);
  }

  /**
   * @param {number[]} xs
   * @param {Session} session
   */
  totals(xs, session) {
    const tokens = this.calls.map(({ usage }) => usage?.total_tokens ?? 0);
    const cost = this.calls.map(({ cost_usd }) => (cost_usd === null ? null : Number(cost_usd)));
    const limit = session.budget?.tokens ?? null;
    const shared = childrenOf(session)?.tokens ? session.used_with_children.tokens : null;
    this.charts.total.set([
      xs,
      running(tokens, session.cumulative_token_usage.total_tokens),
      xs.map(() => shared),
      xs.map(() => limit),
    ]);
    const spent = cost.map((one) => one ?? 0);
    this.charts.cost.set([xs, cost, running(spent, session.cost_usd === null ? sum(spent) : Number(session.cost_usd))]);
    this.charts.cost.element.hidden = cost.every((one) => one === null);
  }

  /** @param {number[]} xs */
  context(xs) {
    const of = (/** @type {(context: import("../types.js").Context, outcome: string) => number | null} */ get) =>
      this.calls.map(({ context, outcome }) => (context ? get(context, outcome) : null));
    const received = of((context) => context.original_tokens);
    // Nothing was sent for a refused call.
    const sent = of((context, outcome) => (outcome === "refused" ? null : context.tokens));
    const most = Math.max(...received.map((one) => one ?? 0));
    // A limit far above all values would make the values too small to see.
    const budget = of((context) => (context.budget !== null && context.budget < 3 * most ? context.budget : null));
    this.charts.context.set(
      [
        xs,
        received,
        sent.map((tokens, index) => (tokens !== null && this.calls[index].context?.shadow ? received[index] : tokens)),
        budget,
      ],
      [xs, received, sent, of((context) => context.budget)],
    );
    this.charts.context.element.hidden = received.every((one) => one === null);
  }

  /** @param {number[]} xs */
  cache(xs) {
    const shares = this.calls.map(({ usage }) =>
      usage?.input_tokens ? usage.cache_read_tokens / usage.input_tokens : null,
    );
    this.charts.cache.set([xs, shares]);
    this.charts.cache.element.hidden = shares.every((one) => one === null);
  }

  close() {
    for (const chart of Object.values(this.charts)) chart.close();
  }
}

/**
 * Return what child sessions used of the session's budget; null without such calls. If cached tokens count less, or the
 * budget has refilled, they may have used more tokens.
 * @param {Session} session
 */
export function childrenOf({ used_with_children: used, calls, cumulative_token_usage: own }) {
  if (used.calls <= calls) return null;
  return { calls: used.calls - calls, tokens: Math.max(0, used.tokens - own.total_tokens) };
}

/** @param {number[]} values */
function sum(values) {
  return values.reduce((total, one) => total + one, 0);
}

/**
 * Return running sums whose last value is `end`. The difference is the sum before the first value.
 * @param {number[]} values
 * @param {number} end
 */
function running(values, end) {
  let total = Math.max(0, end - sum(values));
  return values.map((value) => (total += value));
}

/**
 * Show the response mode and step of the calls: one box for each run of calls with the same value.
 * @param {Call[]} calls
 */
function strip(calls) {
  const rows = /** @type {[string, (call: Call) => string | null | undefined][]} */ ([
    ["Response mode", (call) => call.response_mode],
    ["Step", (call) => call.active_step],
  ]);
  return rows.map(([name, of]) => {
    const stretches = inRow(calls.map((call) => of(call) ?? ""));
    if (stretches.every(([value]) => value === "")) return null;
    const boxes = stretches.map(([value, count]) => {
      const box = h(
        "li",
        { class: `mode-${value}`, title: `${value || "none"}: ${many(count, "call")}` },
        value.replace("_", " ") || "–",
      );
      box.style.flexGrow = String(count);
      return box;
    });
    return h("div", { class: "strip" }, h("span", {}, name), h("ol", { "aria-label": `${name}, by call` }, boxes));
  });
}

/**
 * Return each value with the number of times that it occurs in a row.
 * @param {string[]} values
 * @returns {[string, number][]}
 */
export function inRow(values) {
  /** @type {[string, number][]} */
  const found = [];
  for (const value of values) {
    const last = found.at(-1);
    if (last && last[0] === value) last[1]++;
    else found.push([value, 1]);
  }
  return found;
}
