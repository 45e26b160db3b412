/**
 * The audit log for administrators: who changed sessions, client keys and the configuration.
 * @module
 */
import { api } from "../api.js";
import { fill, h, loading, notice } from "../dom.js";
import { ago, number, usd } from "../format.js";
import { replace, to } from "../router.js";
import { Table } from "../table.js";

/** @typedef {import("../types.js").Change} Change */

const PAGE = 200;
const TYPED_MS = 250;

/**
 * @param {URLSearchParams} params
 * @returns {Promise<import("../types.js").View>}
 */
export async function audit(params) {
  const field = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "search",
      id: "find",
      value: params.get("target") ?? "",
      placeholder: "session or client key",
      spellcheck: "false",
      autocomplete: "off",
    })
  );
  const state = h("span", { class: "muted", role: "status" });
  const place = h("div", {}, loading());
  /** @type {(Change & {place: number})[]} */
  let rows = [];
  /** @type {string | null} */
  let cursor = null;
  let turn = 0;
  let isLoading = false;

  /** @param {string | null} after */
  async function load(after) {
    const mine = ++turn;
    const query = new URLSearchParams({ limit: String(PAGE), target: field.value.trim() });
    if (after) query.set("cursor", after);
    const page = await api(`api/audit?${query}`, { quiet: after !== null });
    if (mine !== turn) return;
    const before = after ? rows : [];
    rows = [
      ...before,
      ...page.changes.map((/** @type {Change} */ row, /** @type {number} */ at) => ({
        ...row,
        place: before.length + at,
      })),
    ];
    cursor = page.cursor;
    draw();
  }

  async function more() {
    if (isLoading || cursor === null) return;
    isLoading = true;
    await load(cursor)
      .catch(failed)
      .finally(() => (isLoading = false));
  }

  function draw() {
    fill(state, rows.length ? `${number(rows.length)}${cursor === null ? "" : ", more below"}` : "");
    table.set(rows);
    fill(place, rows.length ? table.element : nothing(field.value.trim()));
    table.draw();
  }

  /** @param {unknown} error */
  function failed(error) {
    fill(state, error instanceof Error ? error.message : String(error));
  }

  const table = new Table({ label: "Changes", columns: columns(), key: (row) => String(row.place), onEnd: more });
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      replace(to("audit", "", { target: field.value.trim() }));
      load(null).catch(failed);
    }, TYPED_MS);
  });
  await load(null);
  const element = h(
    "div",
    { class: "view" },
    h("div", { class: "title" }, h("h1", {}, "Audit log"), state),
    h("div", { class: "controls" }, h("label", { class: "find" }, h("span", {}, "Find "), field)),
    place,
  );
  const close = () => {
    turn++;
    clearTimeout(timer);
    table.close();
  };
  return { title: "Audit log", element, close };
}

/** @param {string} target */
function nothing(target) {
  return target
    ? notice("No change found", `No kept change has “${target}” in the name of its session or client key.`)
    : notice("No changes yet", "Changes of budgets, sessions, client keys and the configuration appear here.");
}

/** @returns {import("../table.js").Column<Change & {place: number}>[]} */
function columns() {
  const cut = (/** @type {string} */ text) => h("span", { class: "cut", title: text }, text);
  return [
    { name: "Target", width: "15rem", narrow: "9rem", show: target },
    { name: "When", width: "6.6rem", narrow: "5.2rem", show: (row) => ago(row.at) },
    { name: "Action", width: "9.6rem", narrow: "8.2rem", show: (row) => row.action },
    { name: "Change", wide: true, show: (row) => cut(changeText(row.old, row.new)) },
    { name: "By", width: "14.5rem", wide: true, hint: "credential", show: (row) => cut(row.actor) },
    {
      name: "From",
      width: "9rem",
      wide: true,
      hint: "address of the connection, or user and machine of a command",
      show: (row) => cut(row.origin),
    },
  ];
}

/** @param {Change} row */
function target(row) {
  const isSession = row.action.startsWith("session.") && row.action !== "session.delete";
  return isSession
    ? h("a", { class: "mono", href: to("session", row.target), title: row.target }, row.target)
    : h("span", { class: "mono cut", title: row.target }, row.target);
}

/**
 * Return what a change changed: `tokens 100 → 200, calls none → 5`.
 * @param {unknown} old
 * @param {unknown} now
 */
function changeText(old, now) {
  if (!isFields(old) || !isFields(now)) return `${text(old)} → ${text(now)}`;
  const before = /** @type {Record<string, unknown>} */ (old ?? {});
  const after = /** @type {Record<string, unknown>} */ (now ?? {});
  return [...new Set([...Object.keys(before), ...Object.keys(after)])]
    .filter((name) => JSON.stringify(before[name] ?? null) !== JSON.stringify(after[name] ?? null))
    .map((name) => {
      const show = name.endsWith("usd") ? dollars : text;
      if (now === null) return `${name} ${show(before[name])}`;
      if (old === null) return `${name} ${show(after[name])}`;
      return `${name} ${show(before[name])} → ${show(after[name])}`;
    })
    .join(", ");
}

/** @param {unknown} value */
function isFields(value) {
  return typeof value === "object" && !Array.isArray(value);
}

/** @param {unknown} value @returns {string} */
function text(value) {
  if (value === null || value === undefined) return "none";
  if (Array.isArray(value)) return value.map(text).join(" ");
  return typeof value === "number" ? number(value) : String(value);
}

/** @param {unknown} value */
function dollars(value) {
  return typeof value === "string" ? usd(value) : text(value);
}
