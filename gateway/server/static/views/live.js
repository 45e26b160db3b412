/**
 * The live view: calls when they are settled, and their rates; with filters, the newest calls that match.
 * @module
 */
import { api } from "../api.js";
import { Chart } from "../chart.js";
import { fill, h, notice, renew, tile } from "../dom.js";
import { KEPT, feed } from "../feed.js";
import { clock, compact, milliseconds, number, percent, timeOf, usd } from "../format.js";
import { replace, to } from "../router.js";
import { Table } from "../table.js";
import { cachedShare, callColumns, isFailed, isRefused } from "./calls.js";
import { Filters } from "./filters.js";

/** @typedef {import("../types.js").Call} Call */

const BUCKET_S = 30;
const BUCKETS = 40;
const RATE_S = 300;
/** time between two searches while there are new calls */
const SEARCH_MS = 8000;

/**
 * @param {URLSearchParams} params
 * @returns {Promise<import("../types.js").View>}
 */
export async function live(params) {
  let isPaused = false;
  /** @type {Call[]} */
  let held = [];
  const tiles = h("dl", { class: "tiles" });
  const chart = new Chart({
    title: "Tokens and cost per minute",
    heading: "h2",
    lines: [
      { label: "tokens/min", colour: "input", as: "bars", format: compact },
      { label: "cost/min", colour: "cost", scale: "right", format: usd, least: -6 },
    ],
    time: true,
    formatX: (x) => timeOf(x),
    height: 150,
  });
  const filters = new Filters(["key", "model", "status", "agent", "tag", "since"], params, () => go());
  /** calls that match the filters, and the number of searched ones @type {{calls: Call[], searched: number} | null} */
  let found = null;
  let turn = 0;
  let isStale = false;
  const table = new Table({
    label: "Calls, newest first",
    columns: [
      {
        name: "When",
        width: "6.2rem",
        narrow: "6.1rem",
        show: timeLink,
        below: ({ duration_ms: took }) => milliseconds(took),
      },
      ...callColumns({ withSession: true }),
    ],
    key: (call) => call.call_id,
    kind: (call) => (isFailed(call) ? "failed" : ""),
  });
  const state = h("span", { class: "muted", role: "status" });
  const button = h("button", { type: "button", "aria-pressed": "false" }, "Pause");
  const place = h("div", {});

  button.addEventListener("click", () => {
    isPaused = !isPaused;
    held = calls();
    button.setAttribute("aria-pressed", String(isPaused));
    fill(button, isPaused ? "Resume" : "Pause");
    draw();
  });

  function calls() {
    return found?.calls ?? feed.calls;
  }

  /** Search the calls that match the filters. */
  async function search() {
    const mine = ++turn;
    isStale = false;
    if (!filters.size) filters.say();
    const answer = filters.size ? await api(`api/calls?limit=${KEPT}&${filters.query()}`, { quiet: true }) : null;
    if (mine !== turn) return;
    found = answer;
    draw();
    measure();
  }

  /** @param {unknown} error */
  function say(error) {
    isStale = true;
    fill(state, error instanceof Error ? error.message : String(error));
  }

  function go() {
    replace(to("live", "", filters.values));
    table.element.scrollTop = 0;
    search().catch(say);
  }

  function draw() {
    const rows = isPaused ? held : calls();
    table.set(rows);
    const unseen = isPaused ? calls().findIndex((call) => call.call_id === held[0]?.call_id) : 0;
    const waiting = isPaused ? `${unseen < 0 ? `more than ${KEPT}` : number(unseen)} new since the pause` : "";
    fill(state, waiting || (found ? matches(found) : ""));
    fill(place, rows.length ? table.element : found ? notice("No call found", NOT_FOUND) : nothing());
    if (rows.length) table.draw();
  }

  function measure() {
    renew(tiles, rates(calls()));
    chart.set(perMinute(calls()));
  }

  const stop = feed.onCalls(() => {
    isStale = true;
    if (filters.size) return;
    draw();
    measure();
  });
  const searching = setInterval(() => filters.size && isStale && !document.hidden && search().catch(say), SEARCH_MS);
  const showState = () => draw();
  feed.addEventListener("state", showState);
  const timer = setInterval(measure, 5000);
  const element = h(
    "div",
    { class: "view" },
    h("div", { class: "title" }, h("h1", {}, "Live"), state, button),
    filters.element,
    tiles,
    chart.element,
    place,
  );
  if (filters.size) await search();
  else {
    measure();
    draw();
  }
  return {
    title: "Live",
    element,
    update(next) {
      if (filters.set(next)) search().catch(say);
    },
    close() {
      turn++;
      clearInterval(searching);
      stop();
      feed.removeEventListener("state", showState);
      clearInterval(timer);
      table.close();
      chart.close();
    },
  };
}

const NOT_FOUND = "No recent call has all these values. Remove a filter, or choose a longer time.";

/** @param {{calls: Call[], searched: number}} found */
function matches({ calls, searched }) {
  return `${calls.length === KEPT ? `the newest ${KEPT}` : number(calls.length)} of ${number(searched)} searched`;
}

function nothing() {
  if (feed.state === "connecting") return h("p", { class: "loading" }, "Loading …");
  if (feed.state === "locked") return notice("A key is needed", "Calls are shown once it is entered.");
  if (feed.state === "offline")
    return notice("The gateway does not respond", "Check that it is running. This page tries again automatically.");
  return notice(
    "No calls yet",
    `Connect a client to ${location.origin}/v1. Its calls are shown here when they are settled.`,
  );
}

/** @param {Call} call */
function timeLink(call) {
  return h("a", { href: `#/call/${encodeURIComponent(call.call_id)}` }, clock(call.started_at));
}

/** @param {Call[]} calls */
function rates(calls) {
  const now = Date.now();
  const recent = calls.filter((call) => now - Date.parse(call.started_at) < RATE_S * 1000);
  // A full list may not reach back that far.
  const oldest = recent.length === KEPT ? (now - Date.parse(recent[recent.length - 1].started_at)) / 1000 : RATE_S;
  const minutes = Math.max(1, oldest) / 60;
  const sum = (/** @type {(call: Call) => number} */ of) => recent.reduce((total, call) => total + of(call), 0);
  const count = (/** @type {(call: Call) => boolean} */ fits) => {
    const found = recent.filter(fits).length;
    return /** @type {[string, string | null]} */ ([
      number(found),
      recent.length ? percent(found / recent.length) : null,
    ]);
  };
  const times = recent.map((call) => call.duration_ms).sort((a, b) => a - b);
  const unpriced = recent.some((call) => call.usage && call.cost_usd === null);
  return [
    tile("Calls/min", number(recent.length / minutes, 1), "last 5 min"),
    tile("Tokens/min", compact(Math.round(sum((call) => call.usage?.total_tokens ?? 0) / minutes))),
    tile("Cost/min", usd(sum((call) => Number(call.cost_usd ?? 0)) / minutes), unpriced ? "some prices unknown" : null),
    tile("From cache", percent(cachedShare(recent)), "of input"),
    tile("Median time", milliseconds(times.length ? times[Math.floor(times.length / 2)] : null)),
    tile("Failed", ...count(isFailed)),
    tile("Refused", ...count(isRefused)),
    tile("Sessions", number(new Set(recent.map((call) => call.session)).size)),
  ];
}

/**
 * Return the rates in buckets of half a minute. The last bucket is incomplete and not extrapolated.
 * @param {Call[]} calls
 */
function perMinute(calls) {
  const last = Math.floor(Date.now() / 1000 / BUCKET_S);
  const xs = Array.from({ length: BUCKETS }, (_, index) => (last - BUCKETS + 1 + index) * BUCKET_S);
  const tokens = xs.map(() => 0);
  const cost = xs.map(() => 0);
  for (const call of calls) {
    const index = Math.floor(Date.parse(call.started_at) / 1000 / BUCKET_S) - (last - BUCKETS + 1);
    if (index < 0 || index >= BUCKETS) continue;
    tokens[index] += ((call.usage?.total_tokens ?? 0) * 60) / BUCKET_S;
    cost[index] += (Number(call.cost_usd ?? 0) * 60) / BUCKET_S;
  }
  return [xs, tokens, cost];
}
