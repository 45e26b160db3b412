/**
 * Filters of a list, kept in the URL: a field for each, with the values that occur.
 * @module
 */
import { api } from "../api.js";
import { fill, h } from "../dom.js";
import { number } from "../format.js";
import { OUTCOMES } from "./calls.js";

/** time in which values must occur to be offered */
const OFFERED_MS = 7 * 86_400_000;
const HOUR_MS = 3_600_000;
/** Name, label, and the text for no choice. */
const FIELDS = /** @type {Record<string, [string, string]>} */ ({
  key: ["Key", "all keys"],
  model: ["Model", "all models"],
  status: ["Status", "any status"],
  agent: ["Agent type", "all agents"],
  tag: ["Tag", "all tags"],
  since: ["Time", "any time"],
});
const TIMES = /** @type {Record<string, [string, number]>} */ ({
  "1h": ["last hour", HOUR_MS],
  "24h": ["last 24 hours", 24 * HOUR_MS],
  "7d": ["last 7 days", 7 * 24 * HOUR_MS],
  "30d": ["last 30 days", 30 * 24 * HOUR_MS],
});
const STATUSES = ["ok", "failed", ...Object.keys(OUTCOMES).filter((name) => name !== "ok")];

/** The fields of a list. */
export class Filters {
  /**
   * @param {string[]} names
   * @param {URLSearchParams} params
   * @param {() => void} change called when the user has chosen a value
   */
  constructor(names, params, change) {
    this.names = names;
    this.wasOffered = false;
    this.count = h("span", { class: "muted" });
    this.selects = new Map(names.map((name) => [name, select(name, change)]));
    this.clear = h("button", { type: "button", class: "quiet" }, "Clear");
    this.clear.addEventListener("click", () => {
      this.set(new URLSearchParams());
      change();
    });
    const fields = [...this.selects].map(([name, element]) =>
      h("label", {}, h("span", {}, FIELDS[name][0]), " ", element),
    );
    this.element = h(
      "details",
      { class: "filters" },
      h("summary", {}, "Filters ", this.count),
      h("div", {}, fields, this.clear),
    );
    this.element.addEventListener("toggle", () => this.offer());
    this.set(params);
    this.element.toggleAttribute("open", this.size > 0);
  }

  /** Return the chosen values by name. */
  get values() {
    return Object.fromEntries([...this.selects].map(([name, { value }]) => [name, value]));
  }

  get size() {
    return Object.values(this.values).filter(Boolean).length;
  }

  /**
   * Show the values of an address. Return whether this changed any.
   * @param {URLSearchParams} params
   */
  set(params) {
    const before = JSON.stringify(this.values);
    for (const [name, element] of this.selects) {
      const value = params.get(name) ?? "";
      add(element, [value]);
      element.value = value;
    }
    this.say();
    return JSON.stringify(this.values) !== before;
  }

  say() {
    fill(this.count, this.size ? number(this.size) : null);
    this.clear.hidden = this.size === 0;
  }

  /** Return the chosen values as parameters of the API. */
  query() {
    this.say();
    const { since, ...others } = this.values;
    const query = new URLSearchParams(Object.entries(others).filter(([, value]) => value));
    const length = TIMES[since]?.[1];
    if (length) query.set("from", new Date(Date.now() - length).toISOString());
    return query;
  }

  /** Offer the values of the last days, once. */
  async offer() {
    const names = ["key", "model", "agent", "tag"].filter((name) => this.selects.has(name));
    if (this.wasOffered || !names.length) return;
    this.wasOffered = true;
    const from = new Date(Date.now() - OFFERED_MS).toISOString();
    const path = `api/usage?bucket=total&from=${from}&group_by=`;
    // One request for each label: together they would have a line for each combination.
    await Promise.all(
      names.map(async (name) => {
        try {
          /** @type {import("../types.js").UsageReport} */
          const { usage } = await api(path + name, { quiet: true });
          const values = usage.map((line) => String(line[name])).filter((value) => value && value !== "(other)");
          add(/** @type {HTMLSelectElement} */ (this.selects.get(name)), values);
        } catch {
          this.wasOffered = false; // opening the filters again tries again
        }
      }),
    );
  }
}

/**
 * @param {string} name
 * @param {() => void} change
 */
function select(name, change) {
  const element = /** @type {HTMLSelectElement} */ (h("select", { name, onchange: change }));
  element.append(h("option", { value: "" }, FIELDS[name][1]));
  if (name === "since") add(element, Object.keys(TIMES));
  if (name === "status") add(element, STATUSES);
  return element;
}

/**
 * Add the values that are not offered yet, in their order.
 * @param {HTMLSelectElement} element
 * @param {string[]} values
 */
function add(element, values) {
  const known = new Set([...element.options].map(({ value }) => value));
  const text = (/** @type {string} */ value) => TIMES[value]?.[0] ?? value.replaceAll("_", " ");
  const label = ["since", "status"].includes(element.name) ? text : (/** @type {string} */ value) => value;
  for (const value of values) if (!known.has(value)) element.append(h("option", { value }, label(value)));
}
