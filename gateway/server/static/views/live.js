/**
 * The live view: calls when they are settled, and their rates.
 * @module
 */
import { Chart } from "../chart.js";
import { fill, h, notice, renew, tile } from "../dom.js";
import { KEPT, feed } from "../feed.js";
import { clock, compact, milliseconds, number, percent, timeOf, usd } from "../format.js";
import { Table } from "../table.js";
import { cachedShare, callColumns, isFailed, isRefused } from "./calls.js";

/** @typedef {import("../types.js").Call} Call */

const BUCKET_S = 30;
const BUCKETS = 40;
const RATE_S = 300;

/** @returns {import("../types.js").View} */
export function live() {
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
  const table = new Table({
    label: "Calls, newest first",
    columns: [
      { name: "Time", width: "6.2rem", narrow: "6.1rem", show: timeLink },
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
    held = feed.calls;
    button.setAttribute("aria-pressed", String(isPaused));
    fill(button, isPaused ? "Resume" : "Pause");
    draw();
  });

  function draw() {
    const rows = isPaused ? held : feed.calls;
    table.set(rows);
    const unseen = isPaused ? feed.calls.findIndex((call) => call === held[0]) : 0;
    const waiting = isPaused ? `${unseen < 0 ? `more than ${KEPT}` : number(unseen)} new since the pause` : "";
    fill(state, waiting);
    fill(place, rows.length ? table.element : nothing());
    if (rows.length) table.draw();
  }

  function measure() {
    renew(tiles, rates(feed.calls));
    chart.set(perMinute(feed.calls));
  }

  const stop = feed.onCalls(() => {
    draw();
    measure();
  });
  const showState = () => draw();
  feed.addEventListener("state", showState);
  const timer = setInterval(measure, 5000);
  const element = h(
    "div",
    { class: "view" },
    h("div", { class: "title" }, h("h1", {}, "Live"), state, button),
    tiles,
    chart.element,
    place,
  );
  measure();
  draw();
  return {
    title: "Live",
    element,
    close() {
      stop();
      feed.removeEventListener("state", showState);
      clearInterval(timer);
      table.close();
      chart.close();
    },
  };
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
