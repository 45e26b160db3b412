/**
 * What views say of calls alike.
 * @module
 */
import { h } from "../dom.js";
import { compact, milliseconds, number, percent, usd } from "../format.js";
import { to } from "../router.js";

/** @typedef {import("../types.js").Call} Call */

/**
 * What an outcome means, where it is not "ok".
 * @type {Record<string, string>}
 */
export const OUTCOMES = {
  ok: "It went well.",
  provider_error: "The provider refused it, or its stream carried an error.",
  refused: "The gateway refused it.",
  upstream_failed: "The provider gave no answer.",
  upstream_broken: "The provider's answer broke off.",
  budget_end: "The stream was ended because its budget was.",
  client_left: "The client left before the answer had ended.",
  client_stalled: "The client took nothing of the answer for too long.",
  cut_at_shutdown: "The gateway was stopped.",
  too_slow: "A call of the gateway's own took too long.",
  worker_lost: "Its worker was gone before it was settled.",
  pending: "Its answer is made in the background and was not fetched yet.",
  internal_error: "The gateway failed: a bug.",
};

/** The outcomes of calls that failed, as `FAILED` in `gateway/core/record.py` has them. A refused call did not fail. */
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
 * What a trim did: `drop 4, condense 2`.
 * @param {Record<string, number>} trimmed
 */
export function rules(trimmed) {
  return Object.entries(trimmed)
    .map(([rule, count]) => `${rule} ${number(count)}`)
    .join(", ");
}

/** @param {Call} call */
function trim({ context }) {
  if (!context || !Object.keys(context.trimmed).length) return null;
  const left = `−${compact(context.original_tokens - context.tokens)}`;
  const title = `${context.shadow ? "would be, but nothing was changed: " : ""}${rules(context.trimmed)}`;
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
 * The columns of a table of calls, but for the first.
 * @param {{withSession?: boolean}} options
 * @returns {import("../table.js").Column<Call>[]}
 */
export function callColumns({ withSession = false } = {}) {
  const session = (/** @type {Call} */ call) =>
    call.session
      ? h("a", { class: "mono", href: to("session", call.session), title: call.session }, call.session)
      : h("span", { class: "muted" }, "none");
  const model = (/** @type {Call} */ call) =>
    h("span", { class: "cut", title: `${call.provider}/${call.model}` }, call.model || "–");
  return [
    ...(withSession ? [{ name: "Session", show: session }] : []),
    { name: "Model", wide: withSession, ...(withSession ? { width: "11rem" } : {}), show: model },
    { name: "Status", width: "9.8rem", narrow: "4.6rem", show: outcome },
    { name: "Input", width: "5.4rem", narrow: "4.4rem", numeric: true, show: input },
    {
      name: "Cached",
      width: "5.2rem",
      numeric: true,
      wide: true,
      hint: "share of the input that the provider had cached",
      show: ({ usage }) =>
        usage ? percent(usage.input_tokens ? usage.cache_read_tokens / usage.input_tokens : 0) : "–",
    },
    {
      name: "Output",
      width: "5rem",
      narrow: "4.4rem",
      numeric: true,
      wide: withSession,
      show: ({ usage }) => number(usage?.output_tokens),
    },
    { name: "Cost", width: "6.6rem", numeric: true, wide: true, show: ({ cost_usd }) => usd(cost_usd) },
    {
      name: "Time",
      width: "5.4rem",
      numeric: true,
      wide: true,
      hint: "from the request's end to the answer's",
      show: ({ duration_ms }) => milliseconds(duration_ms),
    },
    {
      name: "Left out",
      width: "6rem",
      numeric: true,
      wide: true,
      hint: "tokens that were not sent, and by which rule",
      show: trim,
    },
    {
      name: "Tools",
      width: "9rem",
      wide: true,
      hint: "tools that the answer calls",
      show: ({ tools }) => h("span", { class: "cut", title: tools.join(", ") }, tools.join(", ")),
    },
  ];
}
