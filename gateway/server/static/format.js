/**
 * Format numbers, money and times for people.
 * @module
 */
import { h } from "./dom.js";

const THIN = "\u202f";
const NONE = "–";
const UNITS = /** @type {const} */ ([
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
]);

/**
 * Format a number like the commands: 12,345.
 * @param {number | null | undefined} value
 * @param {number} [digits] digits after the point
 */
export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const [whole, rest] = Math.abs(value).toFixed(digits).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return `${value < 0 ? "−" : ""}${grouped}${rest ? `.${rest}` : ""}`;
}

/**
 * Format a number with a noun: 1 call, 12 calls.
 * @param {number} count
 * @param {string} noun
 */
export function many(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/**
 * Format a number with three digits: 1.23 M.
 * @param {number | null | undefined} value
 */
export function compact(value) {
  if (value === null || value === undefined) return NONE;
  // A number that three digits round up to the next unit is shown in that unit: 1 M, not 1.00e+3 k.
  for (const [size, least, unit] of /** @type {[number, number, string][]} */ ([
    [1e12, 999.5e9, "T"],
    [1e9, 999.5e6, "G"],
    [1e6, 999.5e3, "M"],
    [1e3, 1e4, "k"],
  ])) {
    if (Math.abs(value) >= least) {
      const scaled = value / size;
      return `${scaled.toPrecision(3).replace(/\.?0+$/, (zeros) => (zeros.startsWith(".") ? "" : zeros))}${THIN}${unit}`;
    }
  }
  return number(value, Number.isInteger(value) || Math.abs(value) >= 100 ? 0 : 1);
}

/**
 * Format US dollars: $20, $0.50, $0.0123. Rounded to cents from one dollar, to three digits below.
 * @param {number | string | null | undefined} value
 */
export function usd(value) {
  if (value === null || value === undefined) return NONE;
  const amount = Number(value);
  const size = Math.abs(amount);
  // Three significant digits; records contain at most six decimals.
  const digits = size === 0 || size >= 1 ? 2 : Math.min(6, 2 - Math.floor(Math.log10(size)));
  return `$${number(amount, digits).replace(/\.0+$|(\.\d\d\d*?)0+$/, "$1")}`;
}

/**
 * @param {number | null | undefined} share 0 to 1
 * @param {number} [digits]
 */
export function percent(share, digits = 0) {
  return share === null || share === undefined || !Number.isFinite(share)
    ? NONE
    : `${number(share * 100, digits)}${THIN}%`;
}

/** @param {number | null | undefined} ms */
export function milliseconds(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms === 0) return "0";
  if (ms < 10) return `${ms.toFixed(1)}${THIN}ms`;
  if (ms < 1000) return `${ms.toFixed(0)}${THIN}ms`;
  return ms < 60_000 ? `${(ms / 1000).toFixed(1)}${THIN}s` : span(ms / 1000);
}

/** @param {number} size */
export function bytes(size) {
  if (size < 1024) return `${size}${THIN}B`;
  return size < 1024 ** 2 ? `${(size / 1024).toFixed(1)}${THIN}KiB` : `${(size / 1024 ** 2).toFixed(1)}${THIN}MiB`;
}

/**
 * Format a duration in its largest unit and the next one: 3 h 12 min.
 * @param {number} seconds
 */
export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const index = Math.max(
    0,
    UNITS.findIndex(([size]) => whole >= size),
  );
  if (whole < 1) return `0${THIN}s`;
  const [size, unit] = UNITS[index];
  const next = UNITS[index + 1];
  const rest = next ? Math.floor((whole % size) / next[0]) : 0;
  return `${Math.floor(whole / size)}${THIN}${unit}${next && rest ? ` ${rest}${THIN}${next[1]}` : ""}`;
}

/** @param {number} at Unix time in milliseconds */
function relative(at) {
  const seconds = (Date.now() - at) / 1000;
  if (seconds < 1) return "now";
  const [size, unit] = UNITS.find(([least]) => seconds >= least) ?? UNITS[3];
  return `${Math.floor(seconds / size)}${THIN}${unit} ago`;
}

/**
 * Show how long ago a time was, with the exact time in the title. `keepTimes` updates it.
 * @param {string | null | undefined} iso
 */
export function ago(iso) {
  if (!iso) return h("span", {}, NONE);
  const at = Date.parse(iso);
  return h("time", { datetime: iso, title: exact(iso), "data-at": at }, relative(at));
}

/** @param {string} iso */
export function exact(iso) {
  return `${local(iso)} (${iso})`;
}

/** @param {string} iso */
function local(iso) {
  return new Date(iso).toLocaleString([], { hour12: false });
}

/**
 * Show the date and time of this place, with that of UTC in the title.
 * @param {string} iso
 */
export function moment(iso) {
  return h("time", { datetime: iso, title: iso }, local(iso));
}

/**
 * Show the time of day, with the date if it is not today.
 * @param {string} iso
 */
export function clock(iso) {
  const at = new Date(iso);
  const time = at.toLocaleTimeString([], { hour12: false });
  const isToday = at.toDateString() === new Date().toDateString();
  const text = isToday ? time : `${at.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
  return h("time", { datetime: iso, title: exact(iso) }, text);
}

/**
 * Format the time of day for a chart. `isShort`: without seconds.
 * @param {number} seconds Unix time
 * @param {boolean} [isShort]
 */
export function timeOf(seconds, isShort = false) {
  const at = new Date(seconds * 1000);
  const isToday = Date.now() - at.getTime() < 20 * 3600 * 1000;
  const time = at.toLocaleTimeString([], {
    hour12: false,
    hour: "2-digit",
    minute: "2-digit",
    ...(isShort ? {} : { second: "2-digit" }),
  });
  return isToday ? time : `${at.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

/** characters of an id that stay visible at its end, and length up to which an id has room anyway */
const TAIL = 6;
const SHORT_ID = 16;

/**
 * Show an id. Without room for all of it, its middle is left out, because ids often differ only at the end.
 * @param {string} id
 */
export function shortened(id) {
  if (id.length <= SHORT_ID) return h("span", { class: "id" }, id);
  const head = h("span", { class: "head" }, id.slice(0, -TAIL));
  return h("span", { class: "id" }, head, h("span", {}, id.slice(-TAIL)));
}

/**
 * Format a day of UTC, such as `Nov 28`.
 * @param {number} day counted from 1970
 */
export function dayOf(day) {
  return new Date(day * 86_400_000).toLocaleDateString([], { month: "short", day: "numeric", timeZone: "UTC" });
}

/** Update the texts of `ago` every 5 seconds. */
export function keepTimes() {
  setInterval(() => {
    for (const element of document.querySelectorAll("time[data-at]")) {
      const text = relative(Number(element.getAttribute("data-at")));
      if (element.textContent !== text) element.textContent = text;
    }
  }, 5000);
}
