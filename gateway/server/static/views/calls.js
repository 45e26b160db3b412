/**
 * Texts and table columns for calls, shared by the views.
 * @module
 */
import { h } from "../dom.js";
import { compact, milliseconds, number, percent, shortened, usd } from "../format.js";
import { to } from "../router.js";

/** @typedef {import("../types.js").Call} Call */

/**
 * Explanation of each outcome.
 * @type {Record<string, string>}
 */
export const OUTCOMES = {
  ok: "It succeeded.",
  provider_error: "The provider returned an error, also within a stream.",
  refused: "The gateway refused the call.",
  upstream_failed: "The provider did not respond.",
  upstream_broken: "The provider's response broke off.",
  budget_end: "The gateway ended the stream because the budget was used up.",
  client_left: "The client disconnected before the end of the response.",
  client_stalled: "The client read nothing of the response for too long.",
  cut_at_shutdown: "The gateway was stopped during the call.",
  too_slow: "A call that the gateway made itself took too long.",
  worker_lost: "The worker ended before it settled the call.",
  pending: "The response is created in the background and was not fetched yet.",
  internal_error: "The gateway failed because of a bug.",
};

/** The outcomes of failed calls, like `FAILED` in `gateway/core/record.py`. A refused call is not a failed call. */
const FAILED = [
  "provider_error",
  "upstream_failed",
  "upstream_broken",
  "client_stalled",
  "cut_at_shutdown",
  "too_slow",
  "worker_lost",
  "internal_error",
];

/** @param {Call} call */
export function isFailed(call) {
  return FAILED.includes(call.outcome);
}

/** @param {Call} call */
export function isRefused(call) {
  return call.outcome === "refused";
}

/** @param {Call} call */
export function outcome(call) {
  const text = call.error_code ?? (call.outcome === "ok" ? String(call.status) : call.outcome.replaceAll("_", " "));
  const kind = call.outcome === "ok" ? "good" : isFailed(call) ? "bad" : "warn";
  return h(
    "span",
    { class: `badge ${kind}`, title: `${call.status} · ${OUTCOMES[call.outcome] ?? call.outcome}` },
    text,
  );
}

/**
 * Return the number of calls by what became of them: `34 charged, 7 refused`. Together they are all calls.
 * @param {{calls: number, charged_calls: number, refused_calls: number}} counts
 */
export function countsOf({ calls, charged_calls: charged, refused_calls: refused }) {
  const others = calls - charged - refused;
  const parts = [
    `${number(charged)} charged`,
    refused ? `${number(refused)} refused` : "",
    others > 0 ? `${number(others)} not charged` : "",
  ];
  return parts.filter(Boolean).join(", ");
}

/**
 * Return a tag as the end of a line.
 * @param {string | undefined} tag
 */
export function tagOf(tag) {
  return tag ? ` · ${tag}` : null;
}

/**
 * Link to a session by its id, with the tag of its calls, if there is one.
 * @param {string} id
 * @param {string | undefined} tag
 * @param {import("../dom.js").Child} [after]
 */
export function sessionLink(id, tag, after = null) {
  return h(
    "span",
    { class: "named" },
    h("a", { class: "mono", href: to("session", id), title: id, "aria-label": id }, shortened(id)),
    tag ? h("span", { class: "badge", title: `tag ${tag}` }, tag) : null,
    after,
  );
}

/** @param {Call[]} calls */
export function cachedShare(calls) {
  let input = 0;
  let cached = 0;
  for (const { usage } of calls) {
    input += usage?.input_tokens ?? 0;
    cached += usage?.cache_read_tokens ?? 0;
  }
  return input ? cached / input : null;
}

/**
 * Return the rules of a trim with their numbers: `drop 4, condense 2`.
 * @param {Record<string, number>} trimmed
 */
export function rules(trimmed) {
  return Object.entries(trimmed)
    .map(([rule, count]) => `${rule} ${number(count)}`)
    .join(", ");
}

/** @param {Call} call */
function trim({ context, outcome: end }) {
  // Nothing was sent for a refused call.
  if (!context || end === "refused" || !Object.keys(context.trimmed).length) return null;
  const left = `−${compact(context.original_tokens - context.tokens)}`;
  const title = `${context.shadow ? "shadow, nothing was changed: " : ""}${rules(context.trimmed)}`;
  return h("span", { class: context.shadow ? "badge" : "badge trim", title }, context.shadow ? `(${left})` : left);
}

/** @param {Call} call */
function input({ usage, usage_source: source }) {
  if (!usage) return "–";
  const isGuessed = source !== "provider";
  return isGuessed
    ? h("span", { class: "guessed", title: `usage: ${source}` }, `≈ ${number(usage.input_tokens)}`)
    : number(usage.input_tokens);
}

/**
 * Return the columns of a table of calls, without the first one.
 * @param {{withSession?: boolean}} options
 * @returns {import("../table.js").Column<Call>[]}
 */
export function callColumns({ withSession = false } = {}) {
  const session = (/** @type {Call} */ call) =>
    call.session ? sessionLink(call.session, call.labels?.tag) : h("span", { class: "muted" }, "none");
  const model = (/** @type {Call} */ call) =>
    h("span", { class: "cut", title: `${call.provider}/${call.model}` }, call.model || "–");
  return [
    ...(withSession
      ? [
          {
            name: "Session",
            show: session,
            below: (/** @type {Call} */ call) => [call.model || "–", tagOf(call.labels?.tag)],
          },
        ]
      : []),
    {
      name: "Model",
      wide: withSession,
      ...(withSession ? { width: "10rem" } : {}),
      show: model,
      below: (call) => (withSession ? null : [input(call), " in, ", number(call.usage?.output_tokens), " out"]),
    },
    { name: "Status", width: "11.2rem", narrow: "9.6rem", show: outcome, below: ({ cost_usd: cost }) => usd(cost) },
    { name: "Input", width: "5.4rem", numeric: true, wide: true, show: input },
    {
      name: "Cached",
      width: "4.7rem",
      numeric: true,
      wide: true,
      hint: "share of the input from the provider's cache",
      show: ({ usage }) =>
        usage ? percent(usage.input_tokens ? usage.cache_read_tokens / usage.input_tokens : 0) : "–",
    },
    {
      name: "Output",
      width: "5rem",
      numeric: true,
      wide: true,
      show: ({ usage }) => number(usage?.output_tokens),
    },
    { name: "Cost", width: "6.6rem", numeric: true, wide: true, show: ({ cost_usd }) => usd(cost_usd) },
    {
      name: "Took",
      width: "5.2rem",
      numeric: true,
      wide: true,
      hint: "from the end of the request to the end of the response",
      show: ({ duration_ms }) => milliseconds(duration_ms),
    },
    {
      name: "Removed",
      width: "6rem",
      numeric: true,
      wide: true,
      hint: "tokens that trimming removed; the rules are in the tooltip",
      show: trim,
    },
    {
      name: "Tools",
      width: "7.4rem",
      wide: true,
      hint: "tools that the response calls",
      show: ({ tools }) => h("span", { class: "cut", title: tools.join(", ") }, tools.join(", ")),
    },
  ];
}
