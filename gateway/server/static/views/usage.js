/**
 * The view of usage: what was spent on each day, by client key, model, agent type or another label, and by whom most.
 * @module
 */
import { ApiError, api, request } from "../api.js";
import { Chart } from "../chart.js";
import { choice, fill, h, meter, notice, renew, tile } from "../dom.js";
import { feed } from "../feed.js";
import { compact, dayOf, many, number, percent, usd } from "../format.js";
import { replace, to } from "../router.js";
import { plain } from "../table.js";
import { countsOf } from "./calls.js";

/** @typedef {import("../types.js").UsageLine} UsageLine */
/** @typedef {import("../types.js").UsageReport} UsageReport */
/** @typedef {{name: string, values: number[], counts: UsageLine}} Group values by day, and the sums of its lines */

const DAY_S = 86_400;
const RENEW_MS = 15_000;
/** rows of the table; the chart shows the first ones separately */
const MOST = 100;
const COLOURS = ["input", "output", "cached", "cost", "limit", "more"];
const LABELS = /** @type {[string, string][]} */ ([
  ["key", "Key"],
  ["group", "Group"],
  ["model", "Model"],
  ["agent", "Agent type"],
  ["provider", "Provider"],
  ["tag", "Tag"],
]);
const UNITS = /** @type {[string, string][]} */ ([
  ["cost", "Cost"],
  ["tokens", "Tokens"],
]);
const RANGES = /** @type {[string, string][]} */ ([
  ["7", "7 days"],
  ["30", "30 days"],
  ["90", "90 days"],
]);

/**
 * @param {URLSearchParams} params
 * @returns {Promise<import("../types.js").View>}
 */
export async function usage(params) {
  const view = new UsageView(params);
  await view.show();
  view.start();
  return { title: "Usage", element: view.element, update: (next) => view.update(next), close: () => view.close() };
}

class UsageView {
  /** @param {URLSearchParams} params */
  constructor(params) {
    this.params = params;
    this.turn = 0;
    this.isStale = false;
    /** @type {Chart | null} */
    this.chart = null;
    this.drawn = "";
    this.labels = choice("Separate by", LABELS, (by) => this.go({ by }));
    this.units = choice("Show", UNITS, (show) => this.go({ show }));
    this.ranges = choice("Time", RANGES, (days) => this.go({ days }));
    this.file = h("button", { type: "button", onclick: () => this.download() }, "Download CSV");
    this.state = h("span", { class: "muted", role: "status" });
    this.only = h("p", { hidden: true });
    this.tiles = h("dl", { class: "tiles" });
    this.note = h("p", { class: "muted" });
    this.plot = h("div", {});
    this.table = h("div", { class: "stack" });
    this.body = h("div", { class: "stack" }, this.tiles, this.note, this.plot, this.table);
    this.element = h(
      "div",
      { class: "view" },
      h("div", { class: "title" }, h("h1", {}, "Usage"), this.state),
      h("div", { class: "controls" }, this.labels.element, this.units.element, this.ranges.element, this.file),
      this.only,
      this.body,
    );
    this.stop = () => {};
  }

  /** Load the report again from time to time while there are new calls. */
  start() {
    const stopHearing = feed.onCalls(() => (this.isStale = true));
    const renewing = setInterval(() => this.renew(), RENEW_MS);
    this.stop = () => {
      stopHearing();
      clearInterval(renewing);
    };
  }

  get by() {
    return chosen(LABELS, this.params.get("by"), "key");
  }

  get unit() {
    return chosen(UNITS, this.params.get("show"), "cost");
  }

  get days() {
    return Number(chosen(RANGES, this.params.get("days"), "30"));
  }

  /** Return the values that labels must have: name and value of each. */
  get wanted() {
    return LABELS.map(([name]) => /** @type {[string, string]} */ ([name, this.params.get(name) ?? ""])).filter(
      ([, value]) => value,
    );
  }

  /**
   * Return the address of this view, with these parameters changed.
   * @param {Record<string, string | null>} changes
   */
  address(changes) {
    return to("usage", "", { ...Object.fromEntries(this.params), ...changes });
  }

  /** @param {Record<string, string>} changes */
  go(changes) {
    const address = this.address(changes);
    replace(address);
    this.update(new URLSearchParams(address.split("?")[1] ?? ""));
  }

  /** @param {URLSearchParams} params */
  async update(params) {
    const isSame = String(params) === String(this.params);
    this.params = params;
    if (isSame) return;
    try {
      await this.show();
    } catch (error) {
      fill(this.state, error instanceof Error ? error.message : String(error));
    }
  }

  /** Load and draw the report, or say why there is none, such as too many names for so many days. */
  async show() {
    try {
      await this.load();
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 400)) throw error;
      this.forget();
      fill(this.body, notice("The report is too large", error.message));
    }
  }

  /** Return the first day that is shown, counted from 1970. */
  firstDay() {
    return Math.floor(Date.now() / 1000 / DAY_S) - this.days + 1;
  }

  /** @param {number} first the first day */
  path(first) {
    const query = new URLSearchParams({ group_by: this.by, bucket: "day", ...Object.fromEntries(this.wanted) });
    query.set("from", dateOf(first));
    return `api/usage?${query}`;
  }

  /** Save the report as a file. A link could not send the key in a header. */
  async download() {
    const first = this.firstDay();
    try {
      const response = await request(`${this.path(first)}&format=csv`);
      if (!response.ok) throw new Error(`The gateway returned ${response.status}. Reload the page and try again.`);
      const href = URL.createObjectURL(await response.blob());
      h("a", { href, download: `usage-by-${this.by}-${dateOf(first)}.csv` }).click();
      setTimeout(() => URL.revokeObjectURL(href), RENEW_MS);
    } catch (error) {
      fill(this.state, error instanceof Error ? error.message : String(error));
    }
  }

  /** @param {import("../api.js").Options} [options] */
  async load(options) {
    const mine = ++this.turn;
    this.isStale = false;
    this.labels.press(this.by);
    this.units.press(this.unit);
    this.ranges.press(String(this.days));
    const first = this.firstDay();
    /** @type {UsageReport} */
    const report = await api(this.path(first), options);
    if (mine !== this.turn) return;
    fill(this.state);
    this.draw(report, first);
  }

  async renew() {
    if (!this.isStale || document.hidden) return;
    try {
      await this.load({ quiet: true });
    } catch {
      this.isStale = true; // the top of the page shows that the gateway does not respond
    }
  }

  /**
   * @param {UsageReport} report
   * @param {number} first the first day, counted from 1970
   */
  draw({ usage: lines, total }, first) {
    this.only.hidden = this.wanted.length === 0;
    const parts = this.wanted.map(([name, value]) => [
      `${LABELS.find(([one]) => one === name)?.[1].toLowerCase()} `,
      h("b", {}, value),
      " ",
    ]);
    const all = h(
      "a",
      { href: this.address(Object.fromEntries(this.wanted.map(([name]) => [name, null]))) },
      "show all",
    );
    const wanted = Object.fromEntries(this.wanted);
    // The list of calls has no filter for providers and groups.
    const calls =
      wanted.provider || wanted.group ? [] : [h("a", { href: to("live", "", wanted) }, "newest calls"), " · "];
    const sessions = wanted.key ? [h("a", { href: to("sessions", "", { key: wanted.key }) }, "sessions"), " · "] : [];
    fill(this.only, "Only ", ...parts.flat(), "· ", ...sessions, ...calls, all);
    if (!total.calls) {
      this.forget();
      fill(this.body, nothing(this.days));
      return;
    }
    const groups = groupsOf(lines, this.by, this.unit, first, this.days);
    renew(this.tiles, tilesOf(total));
    fill(this.note, noteOf(total));
    this.drawChart(groups, first);
    fill(
      this.table,
      h("h2", {}, this.unit === "tokens" ? "Most tokens" : this.by === "key" ? "Top spenders" : "Highest costs"),
      this.rows(groups, total),
    );
    fill(this.body, this.tiles, this.note, this.plot, this.table);
  }

  /**
   * @param {Group[]} groups
   * @param {number} first
   */
  drawChart(groups, first) {
    const own = groups.length > COLOURS.length + 1 ? groups.slice(0, COLOURS.length) : groups;
    const rest = groups.slice(own.length);
    const zeros = Array.from({ length: this.days }, () => 0);
    const series = own.map(({ name, values }, index) => ({ name, values, colour: COLOURS[index] ?? "received" }));
    if (rest.length)
      series.push({
        name: `${many(rest.length, "other")}`,
        values: added(
          rest.map(({ values }) => values),
          zeros,
        ),
        colour: "received",
      });
    // A larger sum is drawn behind a smaller one, so that the visible part of each bar is its own value.
    const stacked = series.map((_, index) =>
      added(
        series.slice(index).map(({ values }) => values),
        zeros,
      ),
    );
    const shape = JSON.stringify([this.unit, this.by, series.map(({ name }) => name)]);
    if (shape !== this.drawn) {
      this.forget();
      this.drawn = shape;
      const format = this.unit === "cost" ? usd : compact;
      this.chart = new Chart({
        title: this.unit === "cost" ? "Cost of each day" : "Tokens of each day",
        heading: "h2",
        lines: series.map(({ name, colour }) => ({
          label: name,
          colour,
          as: "bars",
          format,
          least: this.unit === "cost" ? -6 : 0,
        })),
        formatX: (x) => dayOf(x),
        height: 220,
      });
      fill(this.plot, this.chart.element);
    }
    const xs = zeros.map((_, index) => first + index);
    this.chart?.set([xs, ...stacked], [xs, ...series.map(({ values }) => values)]);
  }

  /**
   * @param {Group[]} groups
   * @param {UsageLine} total
   */
  rows(groups, total) {
    const isCost = this.unit === "cost";
    const whole = Number(isCost ? total.cost_usd : total.total_tokens);
    const label = /** @type {string} */ (LABELS.find(([name]) => name === this.by)?.[1]);
    const next = this.by === "key" ? "model" : "key";
    const body = groups.slice(0, MOST).map(({ name, counts }) => {
      const share = whole ? Number(isCost ? counts.cost_usd : counts.total_tokens) / whole : 0;
      const value = counts[this.by];
      const address = this.address({ by: next, [this.by]: String(value) });
      return [
        value ? h("a", { href: address, title: `${name}: by ${next}` }, name) : h("span", { class: "muted" }, name),
        costOf(counts),
        h("span", { class: "budget" }, meter(share, `${percent(share)} of all`), h("span", {}, percent(share))),
        h("span", { title: number(counts.total_tokens) }, compact(counts.total_tokens)),
        percent(counts.input_tokens ? counts.cache_read_tokens / counts.input_tokens : null),
        countsOf(counts),
      ];
    });
    const table = plain(
      `Usage by ${label.toLowerCase()}`,
      [
        [label],
        ["Cost", "num"],
        [isCost ? "Share of cost" : "Share of tokens", "share wide"],
        ["Tokens", "num"],
        ["Cached", "num wide"],
        ["Calls", "wide"],
      ],
      body,
    );
    return [
      table,
      groups.length > MOST ? h("p", { class: "muted" }, `The first ${MOST} of ${number(groups.length)}.`) : null,
    ];
  }

  forget() {
    this.chart?.close();
    this.chart = null;
    this.drawn = "";
  }

  close() {
    this.turn++;
    this.stop();
    this.forget();
  }
}

/**
 * @param {[string, string][]} items
 * @param {string | null} name
 * @param {string} normal
 */
function chosen(items, name, normal) {
  return items.some(([one]) => one === name) ? /** @type {string} */ (name) : normal;
}

/** @param {number} day counted from 1970 */
function dateOf(day) {
  return new Date(day * DAY_S * 1000).toISOString().slice(0, 10);
}

/** @param {number} days */
function nothing(days) {
  return notice(
    `No usage in the last ${days} days`,
    "Usage is added up when calls are settled. Try a longer time, or other filters.",
  );
}

/** @param {UsageLine} total */
function tilesOf(total) {
  const cached = total.input_tokens ? total.cache_read_tokens / total.input_tokens : null;
  return [
    tile("Cost", costOf(total), total.unpriced_calls ? `without ${many(total.unpriced_calls, "call")}` : null),
    tile("Tokens", compact(total.total_tokens)),
    tile("Input", compact(total.input_tokens), cached === null ? null : `${percent(cached)} from cache`),
    tile("Output", compact(total.output_tokens)),
    tile("Calls", number(total.charged_calls), "charged"),
    tile("Refused", number(total.refused_calls), "by the gateway"),
    tile("Failed", number(total.failed_calls)),
  ];
}

/** @param {UsageLine} total */
function noteOf({ unpriced_calls: unknown }) {
  const days = "Days begin at 0:00 UTC; today is not complete.";
  if (!unknown) return days;
  return `The price of the model is unknown for ${many(unknown, "call")}: costs do not include ${unknown === 1 ? "it" : "them"}. ${days}`;
}

/**
 * Return a cost; `unknown` if no call has a price, and `≥` if some have none.
 * @param {UsageLine} counts
 */
function costOf({ cost_usd: cost, charged_calls: charged, unpriced_calls: unknown }) {
  if (!unknown) return usd(cost);
  if (unknown >= charged && !Number(cost)) return h("span", { class: "muted" }, "unknown");
  return h("span", { title: `${many(unknown, "call")} without a known price` }, `≥ ${usd(cost)}`);
}

/**
 * Add the lines with the same label, largest first.
 * @param {UsageLine[]} lines
 * @param {string} by
 * @param {string} unit
 * @param {number} first
 * @param {number} days
 * @returns {Group[]}
 */
function groupsOf(lines, by, unit, first, days) {
  /** @type {Map<string, Group>} */
  const groups = new Map();
  const field = unit === "cost" ? "cost_usd" : "total_tokens";
  for (const line of lines) {
    const value = String(line[by] ?? "");
    const values = Array.from({ length: days }, () => 0);
    const counts = { [by]: value, cost_usd: "0" };
    const group = groups.get(value) ?? { name: value || "none", values, counts: /** @type {UsageLine} */ (counts) };
    groups.set(value, group);
    const day = Math.round(Date.parse(/** @type {string} */ (line.start)) / 1000 / DAY_S) - first;
    if (day >= 0 && day < days) group.values[day] += Number(line[field]);
    for (const [name, count] of Object.entries(line))
      if (typeof count === "number") group.counts[name] = Number(group.counts[name] ?? 0) + count;
    group.counts.cost_usd = String(Number(group.counts.cost_usd) + Number(line.cost_usd));
  }
  const size = (/** @type {Group} */ { counts }) => [Number(counts[field]), counts.total_tokens];
  return [...groups.values()].sort((a, b) => size(b)[0] - size(a)[0] || size(b)[1] - size(a)[1]);
}

/**
 * @param {number[][]} columns
 * @param {number[]} zeros
 */
function added(columns, zeros) {
  return columns.reduce((sums, values) => sums.map((sum, index) => sum + values[index]), zeros);
}
