/**
 * The view of a call: its record, and what was done with each message of its request.
 * @module
 */
import { api } from "../api.js";
import { facts, h } from "../dom.js";
import { bytes, clock, exact, many, milliseconds, number, percent, usd } from "../format.js";
import { to } from "../router.js";
import { Table } from "../table.js";
import { OUTCOMES, outcome, rules } from "./calls.js";

/** @typedef {import("../types.js").Call} Call */
/** @typedef {import("../types.js").Context} Context */
/** @typedef {import("../types.js").Item} Item */

/** Explanation and colour of each rule. */
const RULES = /** @type {Record<string, [string, string]>} */ ({
  kept: ["sent unchanged", "input"],
  pinned: ["had to be sent", "cached"],
  condense: ["reduced to the relevant lines", "output"],
  shorten: ["shortened to its start and end", "output"],
  dedupe: ["replaced by a reference to the same earlier text", "received"],
  summarize: ["replaced by a summary", "cost"],
  recall: ["earlier lines were added at its end", "cost"],
  drop: ["left out", "limit"],
});

/**
 * @param {string} id
 * @returns {Promise<import("../types.js").View>}
 */
export async function call(id) {
  return {
    title: `Call ${id.slice(0, 12)}`,
    element: h("div", { class: "view" }, await detail(id, { withSession: true })),
  };
}

/**
 * @param {string} id
 * @param {{withSession: boolean}} options
 */
export async function detail(id, { withSession }) {
  /** @type {Call} */
  const found = await api(`api/calls/${encodeURIComponent(id)}?explain=1`);
  const session = found.session ? h("a", { class: "mono", href: to("session", found.session) }, found.session) : "none";
  return h(
    "div",
    { class: "call" },
    withSession ? h("p", { class: "crumbs" }, h("a", { href: "#/sessions" }, "Sessions"), " / ", session, " /") : null,
    h(withSession ? "h1" : "h2", {}, "Call ", h("span", { class: "mono" }, found.call_id)),
    h(
      "p",
      {},
      outcome(found),
      " ",
      OUTCOMES[found.outcome] ?? found.outcome,
      " ",
      h("a", { href: to("call", found.call_id) }, "Link to this call"),
    ),
    ...[received(found)].flat(),
    record(found),
    receipt(found, withSession ? "h2" : "h3"),
  );
}

/**
 * Show the error that the client received, and the account of a budget error.
 * @param {Call} found
 */
function received({ error, session }) {
  if (!error) return null;
  const { budget } = error;
  const message = h("p", { class: "problem" }, "The client received: ", error.message);
  if (!budget) return message;
  const format = (/** @type {number | string | null} */ value) =>
    value === null ? "–" : budget.unit === "usd" ? usd(value) : `${number(Number(value))} ${budget.unit}`;
  const inUse = budget.held && Number(budget.held) ? `, and ${format(budget.held)} held by running calls` : "";
  return [
    message,
    facts([
      ["Account", account(budget, session)],
      ["Limit", format(budget.limit)],
      ["Used", `${format(budget.used)}${inUse}`],
      ["Needed", format(budget.needed)],
    ]),
  ];
}

/**
 * @param {import("../types.js").Arithmetic} budget
 * @param {string | null} session session of the call
 */
function account({ account: kind, id }, session) {
  if (kind === "agent") return ["agent ", h("b", {}, id.split("/")[1]), " of session ", h("b", {}, id.split("/")[0])];
  if (kind === "all") return "all client keys together";
  const owners = /** @type {Record<string, string>} */ ({
    key: "client key ",
    rate: "requests per minute of client key ",
    group: "group of client keys ",
  });
  if (kind in owners) return [owners[kind], h("b", {}, id)];
  // With the admin key, session ids are prefixed with the name of their client key.
  const name = session?.includes("/") ? `${session.slice(0, session.lastIndexOf("/"))}/${id}` : id;
  return [
    "session ",
    h("a", { class: "mono", href: to("session", name) }, name),
    name === session ? "" : " (a parent)",
  ];
}

/** @param {Call} found */
function record(found) {
  const { usage } = found;
  const model =
    found.response_model && found.response_model !== found.model
      ? `${found.model}, response from ${found.response_model}`
      : found.model;
  return facts([
    ["Started", [clock(found.started_at), h("span", { class: "muted" }, ` ${exact(found.started_at)}`)]],
    ["Model", h("span", { class: "mono" }, `${found.provider}/${model}`)],
    ["Kind", [...new Set([found.operation, found.dialect, ...(found.stream ? ["streamed"] : [])])].join(", ")],
    [
      "Status",
      `${found.status}${found.error_code ? `, ${found.error_code}` : ""}${found.finish_reason ? `, finish reason ${found.finish_reason}` : ""}`,
    ],
    [
      "Input",
      usage &&
        `${number(usage.input_tokens)} tokens, ${number(usage.cache_read_tokens)} of them cached${usage.cache_write_tokens ? `, ${number(usage.cache_write_tokens)} written to the cache` : ""}`,
    ],
    [
      "Output",
      usage &&
        `${number(usage.output_tokens)} tokens${usage.reasoning_tokens ? `, ${number(usage.reasoning_tokens)} of them reasoning` : ""}`,
    ],
    [
      "Usage",
      usage
        ? found.usage_source === "provider"
          ? "reported by the provider"
          : `estimated by the gateway (${found.usage_source})`
        : "none: the provider does not bill this call",
    ],
    ["Cost", found.cost_usd === null ? usage && "unknown: the model has no price" : usd(found.cost_usd)],
    [
      "Time",
      `${milliseconds(found.duration_ms)}, first byte after ${milliseconds(found.first_byte_ms)}, gateway overhead ${milliseconds(found.overhead_ms)}`,
    ],
    ["Size", `request ${bytes(found.request_bytes)}, response ${bytes(found.response_bytes)}`],
    ["Tools called", found.tools.join(", ")],
    ["Response mode", found.response_mode?.replace("_", " ")],
    ["Step", found.active_step],
    ["Agent", agent(found)],
    ...Object.entries(found.notes).map(([name, text]) => /** @type {[string, string]} */ ([label(name), text])),
    ["Request id", h("span", { class: "mono" }, found.request_id)],
  ]);
}

/** @param {Call} found */
function agent({ agent: id, agent_type: type, parent_agent: parent, request_class: kind }) {
  if (!id) return null;
  const parts = [id, type && type !== id ? `type ${type}` : null, parent ? `started by ${parent}` : null, kind];
  return parts.filter((part, index) => part && (index === 0 || part !== id)).join(", ");
}

/**
 * Return the name of a note as a label.
 * @param {string} name
 */
function label(name) {
  return (name.charAt(0).toUpperCase() + name.slice(1)).replaceAll("_", " ");
}

/**
 * @param {Call} found
 * @param {string} heading element of the heading
 */
function receipt({ context, outcome: end, usage, usage_source: source }, heading) {
  if (!context)
    return h("p", { class: "muted" }, "Its tokens were not counted: requests of this kind have no messages to trim.");
  const off =
    usage && source === "provider" && usage.input_tokens
      ? (usage.input_tokens - context.tokens) / usage.input_tokens
      : null;
  const items = context.items ?? [];
  const tokens = many(context.tokens, "token");
  const isSent = end !== "refused";
  return h(
    "section",
    { class: "receipt" },
    h(heading, {}, "Context"),
    facts([
      ["Received", `${many(context.original_tokens, "token")} (${context.source})`],
      [
        "Sent",
        !isSent
          ? `nothing; it would have been ${tokens}`
          : context.shadow
            ? "unchanged (shadow): the rules below would have been applied"
            : tokens,
      ],
      ["Kept by the provider", context.kept_tokens ? `${many(context.kept_tokens, "token")} of these` : null],
      ["Allowed", context.budget === null ? "no limit" : many(context.budget, "token")],
      [
        isSent ? "Of the sent tokens" : "Of the tokens to send",
        `conversation ${number(context.conversation_tokens)}, tool results ${number(context.tool_tokens)}`,
      ],
      ["Changed", rules(context.trimmed) || "nothing"],
      ["Thinking", thinking(context)],
      [
        "Estimate",
        off === null ? null : `${percent(Math.abs(off), 1)} ${off >= 0 ? "below" : "above"} the reported tokens`,
      ],
    ]),
    items.length
      ? [sharesOf(items), itemsTable(items)]
      : h("p", { class: "muted" }, isSent ? unchanged(context) : "No message was sent."),
  );
}

/** @param {Context} context */
function unchanged({ trimmed }) {
  return Object.keys(trimmed).length ? "No message was left out or shortened." : "Every message was sent unchanged.";
}

/** Why thinking blocks were removed, by the reason in the record. */
const REMOVED = /** @type {Record<string, string>} */ ({
  trim: "a trim changed messages before them",
  mode: "a response mode changed a tool result before them",
  tools: "the tools of the request changed",
  refused: "the provider refused them",
  earlier: "removed on earlier calls",
});

/** @param {Context} context */
function thinking({ thinking: found }) {
  if (!found) return null;
  const { received, sent, reason } = found;
  return `${number(sent)} of ${many(received, "block")} sent${reason ? `: ${REMOVED[reason] ?? reason}` : ""}`;
}

/** @param {Item[]} items */
function sharesOf(items) {
  /** @type {Map<string, {count: number, before: number, after: number}>} */
  const byRule = new Map();
  for (const { rule, tokens, sent_tokens: sent } of items) {
    const one = byRule.get(rule) ?? { count: 0, before: 0, after: 0 };
    byRule.set(rule, { count: one.count + 1, before: one.before + tokens, after: one.after + sent });
  }
  const rows = [...byRule].sort((a, b) => b[1].before - a[1].before);
  const boxes = rows.map(([rule, { before }]) => {
    const box = h("span", { title: `${rule}: ${number(before)} tokens` });
    box.style.flexGrow = String(before);
    box.style.background = `var(--${RULES[rule]?.[1] ?? "muted"})`;
    return box;
  });
  const lines = rows.map(([rule, { count, before, after }]) => {
    const mark = h("span", { class: "mark" });
    mark.style.setProperty("--mark", `var(--${RULES[rule]?.[1] ?? "muted"})`);
    return h(
      "li",
      {},
      mark,
      h("b", {}, rule),
      ` ${number(count)}: ${number(before)} → ${number(after)} `,
      h("span", { class: "muted" }, RULES[rule]?.[0] ?? ""),
    );
  });
  return h(
    "div",
    {},
    h("div", { class: "shares", "aria-hidden": "true" }, boxes),
    h("ul", { class: "legend column" }, lines),
  );
}

/** @param {Item[]} items */
function itemsTable(items) {
  const most = Math.max(1, ...items.map((item) => item.tokens));
  const table = new Table({
    label: "Messages of the request, in order",
    columns: [
      { name: "#", width: "3.2rem", numeric: true, show: (item) => number(item.index) },
      { name: "Role", width: "5.5rem", show: (item) => item.role },
      {
        name: "What was done",
        show: (item) => h("span", { class: `badge rule-${item.rule}`, title: RULES[item.rule]?.[0] }, item.rule),
      },
      { name: "Received", width: "5.4rem", numeric: true, show: (item) => number(item.tokens) },
      { name: "Sent", width: "4.4rem", numeric: true, show: (item) => number(item.sent_tokens) },
      { name: "Tokens", width: "6rem", wide: true, show: (item) => tokenBar(item, most) },
    ],
    key: (item) => String(item.index),
    kind: (item) => (item.sent_tokens === 0 ? "dropped" : ""),
    rowHeight: 26,
  });
  table.set(items);
  return table.element;
}

/**
 * @param {Item} item
 * @param {number} most
 */
function tokenBar(item, most) {
  const received = h("span", { class: "received" });
  const sent = h("span", { class: "sent" });
  received.style.width = `${(item.tokens / most) * 100}%`;
  sent.style.width = `${(Math.min(item.sent_tokens, item.tokens) / most) * 100}%`;
  return h("span", { class: "tokens", "aria-hidden": "true" }, received, sent);
}
