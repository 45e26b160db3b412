/**
 * The views of client keys: the list with budgets, and one key. Administrators make, change, rotate and revoke keys.
 * @module
 */
import { api, ApiError, send } from "../api.js";
import { attempt, buttons, cancel, confirmed, dialog } from "../dialogs.js";
import { facts, fill, h, notice } from "../dom.js";
import { ago, exact, number, span, usd } from "../format.js";
import { to } from "../router.js";
import { Table } from "../table.js";
import { budgetCell } from "./budget.js";
import { bars } from "./session.js";

/** @typedef {import("../types.js").Key} Key */
/** @typedef {import("../types.js").View} View */
/** @typedef {{group: string | null, budget: Key["budget"], window: string | null, problem: string | null}} Shared */
/** @typedef {{keys: Key[], shared: Shared[], calls_need_key: boolean, may_change: boolean}} Keys */
/**
 * A setting that a dialog asks for. `read` converts its text; an empty text means null.
 * @typedef {{name: string, label: string, hint: string, now: string, part?: boolean, read?: (text: string) => unknown}} Setting
 */

const RENEW_MS = 5000;
const KEY_PATH = (/** @type {string} */ name) => `api/keys/${encodeURIComponent(name)}`;

/** @returns {Promise<View>} */
export async function keys() {
  const place = h("div", {});
  const shared = h("div", {});
  const state = h("span", { class: "muted", role: "status" });
  const actions = h("div", { class: "controls" });
  const table = new Table({ label: "Client keys", columns: columns(), key: (row) => row.name });

  /** @param {import("../api.js").Options} [options] */
  async function load(options) {
    /** @type {Keys} */
    const found = await api("api/keys", options);
    fill(state, found.keys.length ? number(found.keys.length) : "");
    table.set(found.keys);
    fill(place, found.keys.length ? table.element : nothing(found));
    fill(shared, found.shared.map(sharedBars));
    const add = h("button", { type: "button", class: "primary", onclick: () => make(found, () => load()) }, "New key");
    if (!actions.childElementCount && found.may_change) fill(actions, add);
    table.draw();
  }

  await load();
  const renewing = setInterval(() => document.hidden || load({ quiet: true }).catch(() => {}), RENEW_MS);
  return {
    title: "Keys",
    element: h(
      "div",
      { class: "view" },
      h("div", { class: "title" }, h("h1", {}, "Keys"), state),
      actions,
      place,
      shared,
    ),
    close() {
      clearInterval(renewing);
      table.close();
    },
  };
}

/** @param {Keys} found */
function nothing({ may_change: mayChange }) {
  return mayChange
    ? notice("No client keys yet", "Each person or program gets a key with its own sessions, budget and rate limit.")
    : notice(
        "No client key",
        "The admin key (auth.admin_key) shows all client keys. A client key shows its own budget.",
      );
}

/**
 * Show a budget that keys share: of a group, or of all keys.
 * @param {Shared} one
 */
function sharedBars({ group, budget, problem }) {
  const title = group === null ? "All keys together" : `Group ${group}`;
  const shown = budget ? bars(title, budget, "") : h("p", { class: "muted" }, problem ?? "No budget.");
  return h("section", {}, h("h2", {}, title), shown);
}

/** @returns {import("../table.js").Column<Key>[]} */
function columns() {
  return [
    {
      name: "Key",
      show: (row) => [h("a", { class: "mono", href: to("keys", row.name), title: row.name }, row.name), badge(row)],
    },
    { name: "Group", width: "7rem", wide: true, show: (row) => row.group ?? "–" },
    { name: "Models", width: "9rem", wide: true, show: (row) => row.models.join(", ") || "all" },
    { name: "Last used", width: "6.6rem", narrow: "6rem", show: (row) => ago(row.last_used_at) },
    { name: "Sessions", width: "5.4rem", numeric: true, wide: true, show: (row) => number(row.sessions) },
    { name: "Spent", width: "11rem", numeric: true, wide: true, hint: "in this window of its budget", show: spent },
    { name: "Budget", width: "9rem", narrow: "4.9rem", show: budgetOf },
    { name: "Refills in", width: "8.4rem", numeric: true, wide: true, show: (row) => refills(row) },
    { name: "Expires", width: "7.6rem", wide: true, show: (row) => (row.expires_at ? date(row.expires_at) : "never") },
  ];
}

/** @param {Key} row */
function badge(row) {
  if (isExpired(row)) return h("span", { class: "badge" }, "expired");
  const title = "This key is in auth.keys of the configuration, which alone can change it.";
  return row.in_configuration ? h("span", { class: "badge", title }, "configured") : null;
}

/** @param {Key} row */
function isExpired(row) {
  return row.expires_at !== null && Date.parse(row.expires_at) <= Date.now();
}

/** @param {string} iso */
function date(iso) {
  return h("time", { datetime: iso, title: exact(iso) }, iso.slice(0, 10));
}

/** @param {Key} row */
function spent({ budget }) {
  if (!budget) return "–";
  if (budget.usd !== null) return `${usd(budget.used.usd)} of ${usd(budget.usd)}`;
  if (budget.tokens !== null) return `${number(budget.used.tokens)} of ${number(budget.tokens)}`;
  return `${number(budget.used.calls)} of ${number(budget.calls)}`;
}

/** @param {Key} row */
function refills({ budget }) {
  return budget && budget.resets_in_s !== null ? span(budget.resets_in_s) : "–";
}

/** @param {Key} row */
function budgetOf({ budget, problem }) {
  return problem ? h("span", { class: "problem", title: problem }, "cannot be read") : budgetCell(budget);
}

/**
 * @param {string} name
 * @returns {Promise<View>}
 */
export async function key(name) {
  const place = h("div", {});

  /** @param {import("../api.js").Options} [options] */
  async function load(options) {
    /** @type {Keys} */
    const found = await api("api/keys", options);
    const row = found.keys.find((one) => one.name === name);
    if (!row) throw new ApiError(404, "not_found", `There is no client key “${name}”, or it belongs to another client.`);
    fill(place, details(row), found.may_change && !row.in_configuration ? manage(row, () => load()) : null);
  }

  await load();
  const isAsking = () => document.hidden || document.querySelector("dialog") !== null;
  const renewing = setInterval(() => isAsking() || load({ quiet: true }).catch(() => {}), RENEW_MS);
  return {
    title: name,
    element: h("div", { class: "view" }, h("div", { class: "title" }, h("h1", { class: "mono" }, name)), place),
    close: () => clearInterval(renewing),
  };
}

/** @param {Key} row */
function details(row) {
  const note =
    row.budget && row.budget.resets_in_s !== null ? `The budget refills in ${span(row.budget.resets_in_s)}.` : "";
  const expires = row.expires_at ? [ago(row.expires_at), ` (${exact(row.expires_at)})`] : "never";
  return h(
    "div",
    {},
    row.problem ? h("p", { class: "problem" }, row.problem) : null,
    row.budget
      ? bars("Budget", row.budget, "", note ? h("p", { class: "muted" }, note) : null)
      : h("p", { class: "muted" }, row.problem ? "" : "No budget: this key has no limit."),
    facts([
      ["Group", row.group],
      ["Models", row.models.join(", ") || "all"],
      ["Calls per minute", row.rpm === null ? "no limit" : number(row.rpm)],
      ["Budget refills", row.budget && (row.window === null ? "never" : `every ${row.window}`)],
      ["Expires", isExpired(row) ? expires : row.expires_at ? exact(row.expires_at) : "never"],
      ["Last used", row.last_used_at ? ago(row.last_used_at) : "not in the time for which sessions are kept"],
      ["Sessions", h("a", { href: to("sessions", "", { key: row.name }) }, number(row.sessions))],
      ["Usage", h("a", { href: to("usage", "", { key: row.name, by: "model" }) }, "by model and day")],
      ["Replaced secrets", row.replaced_until.map((until) => `accepted until ${exact(until)}`).join("; ")],
      [
        "Made",
        row.in_configuration ? "in the configuration (auth.keys), which alone can change it" : ago(row.created_at),
      ],
    ]),
  );
}

/**
 * Create the actions of an administrator.
 * @param {Key} row
 * @param {() => void} then
 */
function manage(row, then) {
  const button = (/** @type {string} */ text, /** @type {() => void} */ act) =>
    h("button", { type: "button", onclick: act }, text);
  return buttons(
    button("Change", () => change(row, then)),
    button("Rotate", () => rotate(row, then)),
    button("Revoke", () => revoke(row)),
  );
}

/**
 * @param {Key | null} row
 * @returns {Setting[]}
 */
function settings(row) {
  const text = (/** @type {unknown} */ value) => (value === null || value === undefined ? "" : String(value));
  const budget = row?.budget;
  const list = (/** @type {string} */ given) => given.split(/[\s,]+/);
  return [
    { name: "usd", label: "US dollars", hint: "no limit", now: text(budget?.usd && Number(budget.usd)), part: true },
    { name: "tokens", label: "Tokens", hint: "no limit", now: text(budget?.tokens), part: true },
    { name: "calls", label: "Calls", hint: "no limit", now: text(budget?.calls), part: true },
    { name: "window", label: "Refills", hint: "never; or 1h, day, month", now: row?.window ?? "", part: true },
    { name: "rpm", label: "Calls a minute", hint: "no limit", now: text(row?.rpm) },
    { name: "models", label: "Models", hint: "all; or gpt-* claude-*", now: row?.models.join(" ") ?? "", read: list },
    { name: "group", label: "Group", hint: "none", now: row?.group ?? "" },
    { name: "expires", label: "Expires", hint: "never; or 30d, 2026-12-31", now: row?.expires_at ?? "" },
  ];
}

/**
 * Create the fields of a dialog.
 * @param {Setting[]} wanted
 */
function fields(wanted) {
  const inputs = wanted.map(
    (setting) =>
      /** @type {HTMLInputElement} */ (
        h("input", {
          id: `key-${setting.name}`,
          value: setting.now,
          placeholder: setting.hint,
          spellcheck: "false",
          autocomplete: "off",
        })
      ),
  );
  const rows = wanted.map((setting, index) =>
    h("div", { class: "field" }, h("label", { for: `key-${setting.name}` }, setting.label), inputs[index]),
  );
  /** Return the settings that differ from those of before, with their new texts. */
  const changed = () =>
    wanted
      .map((setting, index) => ({ setting, text: inputs[index].value.trim() }))
      .filter(({ setting, text }) => text !== setting.now);
  return { rows, changed };
}

/**
 * Return the body of a request that changes these settings.
 * @param {{setting: Setting, text: string}[]} changes
 */
function body(changes) {
  /** @type {Record<string, any>} */
  const asked = {};
  for (const { setting, text } of changes) {
    const value = text === "" ? null : setting.read ? setting.read(text) : text;
    if (setting.part) (asked.budget ??= {})[setting.name] = value;
    else asked[setting.name] = value;
  }
  return asked;
}

/**
 * @param {Keys} found
 * @param {() => void} then
 */
async function make(found, then) {
  const name = { name: "name", label: "Name", hint: "such as bob", now: "" };
  const { rows, changed } = fields([name, ...settings(null)]);
  const made = await form("New client key", rows, "Make the key", () => send("POST", "api/keys", body(changed())), [
    "Its sessions belong to its name. An empty field means no limit.",
    found.calls_need_key ? "" : "This is the first client key. Once it exists, calls without a client key are refused.",
  ]);
  if (made) await showSecret(made.name, made.key);
  if (made) then();
}

/**
 * Ask for new settings, show what they change, and set them.
 * @param {Key} row
 * @param {() => void} then
 */
async function change(row, then) {
  const { rows, changed } = fields(settings(row));
  const review = () => {
    const changes = changed();
    if (!changes.length) throw new Error("Nothing was changed. Enter a new value in a field.");
    return Promise.resolve(changes);
  };
  const changes = await form(`Change ${row.name}`, rows, "Review", review, [
    "Its clients keep their key. An empty field means no limit.",
  ]);
  if (!changes) return;
  const lines = changes.map(({ setting, text }) => `${setting.label}: ${setting.now || "none"} → ${text || "none"}`);
  const act = () => send("PATCH", KEY_PATH(row.name), body(changes));
  if (await confirmed(`Change ${row.name}?`, `${lines.join("; ")}.`, "Change the key", act)) then();
}

/**
 * @param {Key} row
 * @param {() => void} then
 */
async function rotate(row, then) {
  const overlap = { name: "overlap", label: "Overlap", hint: "24h; 0: the present key ends now", now: "" };
  const { rows, changed } = fields([overlap]);
  const act = () => send("POST", `${KEY_PATH(row.name)}/rotate`, { overlap: changed()[0]?.text ?? "24h" });
  const made = await form(`Rotate ${row.name}?`, rows, "Rotate", act, [
    "The client gets a new key. The present one is still accepted during the overlap.",
  ]);
  if (made) await showSecret(row.name, made.key);
  if (made) then();
}

/** @param {Key} row */
async function revoke(row) {
  const text = "Within seconds its calls are refused. Its sessions and what it has used stay. This cannot be undone.";
  if (await confirmed(`Revoke ${row.name}?`, text, "Revoke", () => send("DELETE", KEY_PATH(row.name))))
    location.hash = to("keys");
}

/**
 * Show a dialog with fields. After an error it stays open and shows it.
 * @template T
 * @param {string} title
 * @param {HTMLElement[]} rows
 * @param {string} verb label of the button
 * @param {() => Promise<T>} act
 * @param {string[]} texts
 * @returns {Promise<T | null>} what `act` returned
 */
function form(title, rows, verb, act, texts) {
  return dialog(title, (close) => {
    const problem = h("p", { class: "problem", role: "alert", hidden: true });
    const button = h("button", { type: "submit", class: "primary" }, verb);
    const submitted = (/** @type {Event} */ event) => {
      event.preventDefault();
      /** @type {T} */
      let done;
      attempt(
        button,
        problem,
        async () => (done = await act()),
        () => close(done),
      );
    };
    const shown = texts.filter(Boolean).map((text) => h("p", {}, text));
    return [h("form", { novalidate: true, onsubmit: submitted }, shown, rows, problem, buttons(button, cancel(close)))];
  });
}

/**
 * Show a new secret, once.
 * @param {string} name
 * @param {string} secret
 */
function showSecret(name, secret) {
  return dialog(`The key of ${name}`, (close) => {
    const field = /** @type {HTMLInputElement} */ (
      h("input", { id: "secret", class: "mono", readonly: true, value: secret })
    );
    const copy = h("button", { type: "button", class: "primary" }, "Copy");
    copy.addEventListener("click", async () => {
      field.select();
      await navigator.clipboard?.writeText(secret).catch(() => {});
      fill(copy, "Copied");
    });
    return [
      h("p", {}, "It is shown only now. All running gateways accept it within seconds."),
      h("label", { for: "secret" }, "Key"),
      field,
      buttons(copy, h("button", { type: "button", onclick: () => close(null) }, "Done")),
    ];
  });
}
