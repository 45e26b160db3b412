/**
 * The view of a session: its usage and budget, its calls over time, what was trimmed, its tools.
 * @module
 */
import { ApiError, api, sessionPath } from "../api.js";
import { choice, fill, h, meter, renew, tile } from "../dom.js";
import { feed, merged } from "../feed.js";
import { ago, clock, compact, exact, many, milliseconds, number, percent, span, usd } from "../format.js";
import { replace, to } from "../router.js";
import { Table } from "../table.js";
import { agentsOf } from "./agents.js";
import { changeBudget, resetSession, resumeSession } from "./budget.js";
import { detail } from "./call.js";
import { callColumns, countsOf, isFailed, isRefused } from "./calls.js";
import { Charts, childrenOf, inRow } from "./charts.js";

/** @typedef {import("../types.js").Call} Call */
/** @typedef {import("../types.js").Session} Session */
/** @typedef {{calls: Call[], cursor: string | null}} Page newest first */

const PAGE = 1000;
/** calls to load when there are new ones; if more are missing, a page is loaded */
const FEW = 100;
const RENEW_MS = 1000;
/** tags of its calls that the title shows */
const MOST_TAGS = 5;
const FILTERS = /** @type {[string, string, (call: Call) => boolean][]} */ ([
  ["", "All", () => true],
  ["trimmed", "Trimmed", ({ context }) => Boolean(context && Object.keys(context.trimmed).length)],
  ["failed", "Failed", isFailed],
  ["refused", "Refused", isRefused],
]);

/**
 * @param {string} id
 * @param {URLSearchParams} params
 * @returns {Promise<import("../types.js").View>}
 */
export async function session(id, params) {
  const path = sessionPath(id);
  const found = await api(path);
  const view = new SessionView(id, found, await api(`${path}/calls?limit=${PAGE}`));
  view.update(params);
  return { title: id, element: view.element, update: (next) => view.update(next), close: () => view.close() };
}

class SessionView {
  /**
   * @param {string} id
   * @param {Session} found
   * @param {Page} page
   */
  constructor(id, found, page) {
    this.id = id;
    this.path = sessionPath(id);
    this.found = found;
    this.calls = page.calls;
    this.cursor = page.cursor;
    /** charged calls that are not listed: they are on the next page, or were deleted */
    this.unlisted = unlisted(found, page.calls);
    this.asked = 0;
    this.drawn = 0;
    this.params = new URLSearchParams();
    this.opened = "";
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.facts = h("div", { class: "stack" });
    this.charts = new Charts((call) => this.open(call.call_id));
    this.counts = FILTERS.map(() => h("span", { class: "muted" }));
    this.filters = choice(
      "Which calls",
      FILTERS.map(([name, text], index) => [name, [text, " ", this.counts[index]]]),
      (name) => this.filter(name),
    );
    /** shown only after runaway protection has refused calls */
    this.resume = h("button", { type: "button", class: "primary" }, "Resume");
    this.problem = h("p", { class: "problem", role: "alert", hidden: true });
    this.count = h("span", { class: "muted", role: "status" });
    this.tags = h("span", {});
    this.panel = h("aside", { class: "panel", "aria-label": "Call", hidden: true });
    this.panel.addEventListener("keydown", (event) => event.key === "Escape" && this.open(""));
    this.table = new Table({
      label: "Calls of this session, newest first",
      columns: [
        {
          name: "When",
          width: "8.4rem",
          narrow: "6.1rem",
          show: (call) => this.link(call),
          below: ({ duration_ms: took }) => milliseconds(took),
        },
        ...callColumns(),
      ],
      key: (call) => call.call_id,
      kind: (call) => `${isFailed(call) ? "failed" : ""} ${call.call_id === this.opened ? "opened" : ""}`,
    });
    this.older = h("button", { type: "button", onclick: () => this.loadOlder() }, "Load older calls");
    this.element = h(
      "div",
      { class: "view session" },
      h("p", { class: "crumbs" }, h("a", { href: "#/sessions" }, "Sessions"), " /"),
      h("div", { class: "title" }, h("h1", { class: "mono", title: id }, id), this.tags, this.actions()),
      this.problem,
      this.facts,
      this.charts.element,
      h("div", { class: "title" }, h("h2", {}, "Calls"), this.count, this.filters.element),
      this.table.element,
      h("p", {}, this.older),
      this.panel,
    );
    this.stop = feed.onCalls((fresh, isGap) => this.hear(fresh, isGap));
    this.drawFacts();
    this.drawCalls();
  }

  actions() {
    const done = () => this.renew().catch((error) => this.say(error));
    this.resume.addEventListener("click", () => resumeSession(this.found, done));
    return h(
      "div",
      { class: "buttons" },
      h("button", { type: "button", onclick: () => changeBudget(this.found, done) }, "Change budget"),
      h("button", { type: "button", onclick: () => resetSession(this.found, done) }, "Reset"),
      this.resume,
    );
  }

  /** @param {Call} call */
  link(call) {
    return h("a", { href: this.address({ call: call.call_id }) }, clock(call.started_at));
  }

  /**
   * Return the address of this view with the same filters, except for these.
   * @param {Record<string, string | null>} changes
   */
  address(changes) {
    return to("session", this.id, { show: this.params.get("show"), agent: this.params.get("agent"), ...changes });
  }

  /** @param {URLSearchParams} params */
  update(params) {
    const before = this.params;
    this.params = params;
    if (["show", "agent"].some((name) => before.get(name) !== params.get(name))) this.drawCalls();
    else this.drawFilters();
    this.showCall(params.get("call") ?? "");
  }

  /** @param {string} callId none: the panel is closed */
  open(callId) {
    location.hash = this.address({ call: callId });
  }

  /** @param {string} callId */
  async showCall(callId) {
    if (callId === this.opened) return;
    const before = this.opened;
    this.opened = callId;
    for (const one of [before, callId]) this.table.shown.get(one)?.element.classList.toggle("opened", one === callId);
    this.panel.hidden = callId === "";
    if (callId === "") {
      fill(this.panel);
      this.table.shown.get(before)?.element.querySelector("a")?.focus();
      return;
    }
    const close = h(
      "button",
      { type: "button", class: "quiet close", "aria-label": "Close", onclick: () => this.open("") },
      "✕",
    );
    const content = await detail(callId, { withSession: false }).catch((error) =>
      h("p", { class: "problem", role: "alert" }, error.message),
    );
    if (this.opened !== callId) return;
    fill(this.panel, close, content);
    close.focus({ preventScroll: true });
  }

  drawFilters() {
    this.filters.press(this.params.get("show") ?? "");
    const calls = this.ofAgent();
    FILTERS.forEach(([, , fits], index) => fill(this.counts[index], number(calls.filter(fits).length)));
  }

  /** Return the loaded calls of the chosen agent, or all of them. */
  ofAgent() {
    const agent = this.params.get("agent");
    return agent ? this.calls.filter((call) => (call.agent ?? "main") === agent) : this.calls;
  }

  /** @param {string} name */
  filter(name) {
    const address = this.address({ show: name, call: this.opened });
    replace(address);
    this.update(new URLSearchParams(address.split("?")[1] ?? ""));
  }

  drawCalls() {
    const fits = FILTERS.find(([name]) => name === (this.params.get("show") ?? ""))?.[2] ?? FILTERS[0][2];
    const rows = this.ofAgent().filter(fits);
    this.table.set(rows);
    // Rows that were drawn before have the address with the filters of then.
    for (const [id, row] of this.table.shown)
      row.element.querySelector("a")?.setAttribute("href", this.address({ call: id }));
    this.drawFilters();
    const all = this.found.calls > this.calls.length ? `, of ${number(this.found.calls)}` : "";
    const counts = countsOf({
      calls: rows.length,
      charged_calls: rows.filter(({ usage }) => usage).length,
      refused_calls: rows.filter(isRefused).length,
    });
    const agent = this.params.get("agent");
    const every = h("a", { href: this.address({ agent: null, call: this.opened }) }, "show all agents");
    fill(this.count, `${counts}${all}`, ...(agent ? [` of agent ${agent}, `, every] : []));
    if (this.cursor === null && document.activeElement === this.older) this.table.element.focus();
    this.older.hidden = this.cursor === null;
    const tags = [...new Set(this.calls.map((call) => call.labels?.tag ?? ""))].filter(Boolean).slice(0, MOST_TAGS);
    fill(
      this.tags,
      tags.map((tag) => h("span", { class: "badge", title: `tag ${tag}` }, tag)),
    );
    this.charts.set(this.found, this.calls);
  }

  async loadOlder() {
    const { cursor } = this;
    if (this.older.ariaBusy === "true") return;
    this.older.ariaBusy = "true";
    try {
      const page = await api(`${this.path}/calls?limit=${PAGE}&cursor=${cursor}`);
      if (cursor !== this.cursor) return;
      this.calls = [...this.calls, ...page.calls];
      this.cursor = page.cursor;
      this.unlisted = unlisted(this.found, this.calls);
      this.drawCalls();
    } catch (error) {
      fill(this.count, error instanceof Error ? error.message : String(error));
    } finally {
      this.older.ariaBusy = "false";
    }
  }

  /**
   * @param {Call[]} fresh
   * @param {boolean} isGap
   */
  hear(fresh, isGap) {
    if (!isGap && !fresh.some((call) => call.session === this.id)) return;
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      // If the gateway does not respond, or a key is needed, the top of the page says so.
      this.renew().catch((error) => [0, 401].includes(error.status) || this.say(error));
    }, RENEW_MS);
  }

  /** @param {unknown} error */
  say(error) {
    this.problem.hidden = false;
    fill(this.problem, `This view could not be updated: ${error instanceof Error ? error.message : error}`);
  }

  /** Load the current session and its new calls. */
  async renew() {
    const turn = ++this.asked;
    // Load the session first: then the list contains all calls that it counts.
    const found = await api(this.path, { quiet: true });
    const newest = (/** @type {number} */ limit) => api(`${this.path}/calls?limit=${limit}`, { quiet: true });
    const wasReset = found.calls < this.found.calls;
    const few = await newest(FEW);
    const isEnough = wasReset || unlisted(found, merged(this.calls, few.calls)) <= this.unlisted;
    const page = isEnough ? few : await newest(PAGE);
    if (turn < this.drawn) return; // a later request was answered first
    this.drawn = turn;
    this.add(page);
    const left = unlisted(found, this.calls);
    // The list may contain newer calls that the loaded session does not count yet.
    this.unlisted = wasReset ? left : Math.max(left, this.unlisted);
    this.found = found;
    this.problem.hidden = true;
    this.drawFacts();
    this.drawCalls();
  }

  /**
   * Add the newest calls. If they do not reach back to a known call, the known calls are forgotten, because the calls
   * between would be missing. They can be loaded again.
   * @param {Page} page
   */
  add({ calls, cursor }) {
    const known = new Map(this.calls.map((call) => [call.call_id, call]));
    // Unchanged rows are not drawn again.
    const same = (/** @type {Call} */ call) =>
      known.get(call.call_id)?.outcome === call.outcome ? known.get(call.call_id) : call;
    const isApart = !calls.some((call) => known.has(call.call_id));
    const newest = /** @type {Call[]} */ (calls.map(same));
    this.calls = isApart ? newest : merged(this.calls, newest);
    if (this.calls.at(-1) === newest.at(-1)) this.cursor = cursor;
  }

  drawFacts() {
    const { found } = this;
    this.resume.hidden = !found.last_stop;
    const usage = found.cumulative_token_usage;
    const share = usage.input_tokens ? usage.cache_read_tokens / usage.input_tokens : null;
    const saved = found.saved_by_trimming;
    const tiles = h(
      "dl",
      { class: "tiles" },
      tile("Calls", number(found.calls), ["last ", ago(found.last_call_at)]),
      tile(
        "Tokens",
        number(usage.total_tokens),
        usage.estimated_tokens ? `${number(usage.estimated_tokens)} estimated` : null,
      ),
      tile("Input", number(usage.input_tokens), share === null ? null : `${percent(share)} from cache`),
      tile(
        "Output",
        number(usage.output_tokens),
        usage.reasoning_tokens ? `${number(usage.reasoning_tokens)} reasoning` : null,
      ),
      tile("Cost", usd(found.cost_usd), found.cost_usd === null ? "a price is unknown" : null),
      tile("Removed", number(saved.input_tokens), `in ${many(saved.calls, "call")}`),
      tile(
        "Response mode",
        found.response_mode.replace("_", " "),
        found.active_step ? ["step ", found.active_step] : null,
      ),
      found.last_stop ? tile("Last stop", found.last_stop.replace("_", " "), "calls refused") : null,
      began(found.created_at),
    );
    const agents = agentsOf(found.agents ?? [], (agent) => this.address({ agent, call: null }));
    renew(this.facts, tiles, parentLine(found), budgetBars(found), parentBars(found), agents, toolsOf(found));
  }

  close() {
    this.stop();
    clearTimeout(this.timer);
    this.table.close();
    this.charts.close();
  }
}

/**
 * @param {Session} found
 * @param {Call[]} calls
 */
function unlisted(found, calls) {
  return found.calls - calls.filter(({ usage }) => usage).length;
}

/** @param {Session} found */
function parentLine({ parents = [] }) {
  if (!parents.length) return null;
  const links = parents.map(({ id }, index) => [
    index ? ", " : "",
    h("a", { class: "mono", href: to("session", id) }, id),
  ]);
  return h(
    "p",
    {},
    parents.length > 1 ? "Calls are also charged to the parents " : "Calls are also charged to the parent ",
    ...links,
  );
}

/** @param {Session} found */
function budgetBars(found) {
  const { budget, declared_budget: declared } = found;
  if (!budget) return h("p", { class: "muted" }, "No budget: this session has no limit.");
  const held = budget.held ? `Running calls hold ${number(budget.held)} tokens. ` : "";
  const resets = budget.resets_in_s === null ? "" : `The budget refills in ${number(budget.resets_in_s)} s. `;
  const closing = budget.is_closed
    ? "Its closing call was taken: further calls are refused until the budget is raised or refilled. "
    : budget.kept_for_closing && budget.remaining !== 0
      ? `${number(budget.kept_for_closing)} tokens are kept for its closing call. `
      : "";
  const source = declared ? "Its last call declared a budget in its headers (x-session-budget-…). " : "";
  const children = childrenOf(found);
  const shared = children
    ? `Child sessions used ${children.tokens ? `about ${number(children.tokens)} tokens` : "some"} of it, in ${many(children.calls, "call")}.`
    : "";
  const notes = `${rateOf(found)}${held}${resets}${closing}${source}${shared}`;
  return bars("Budget", budget, "", notes ? h("p", { class: "muted" }, notes) : null);
}

/** @param {Session} found */
function rateOf({ burn_rate: rate, budget }) {
  if (!rate || budget?.is_closed) return "";
  if (!rate.empty_in_s) return "The budget is empty. ";
  if (rate.refills_first) return "At this rate the budget refills before it is empty. ";
  return `At this rate empty in ${span(rate.empty_in_s)}, ${many(rate.empty_in_calls, "call")}. `;
}

/** @param {Session} found */
function parentBars({ parents = [] }) {
  return parents.map(({ id, budget }) => budget && bars(`Budget of parent ${id}`, budget, "Parent: "));
}

/**
 * @param {string} label
 * @param {import("../types.js").Budget} budget
 * @param {string} prefix prefix of the name of each bar
 * @param {Node | null} [notes]
 */
export function bars(label, budget, prefix, notes = null) {
  return h(
    "div",
    { class: "bars", role: "group", "aria-label": label },
    bar(`${prefix}Tokens`, budget.used.tokens, budget.tokens, number),
    bar(`${prefix}Cost`, Number(budget.used.usd), budget.usd === null ? null : Number(budget.usd), usd),
    bar(`${prefix}Calls`, budget.used.calls, budget.calls, number),
    notes,
  );
}

/**
 * @param {string} name
 * @param {number} used
 * @param {number | null} limit
 * @param {(value: number) => string} format
 */
function bar(name, used, limit, format) {
  if (limit === null) return null;
  const share = limit ? used / limit : 1;
  const text = `${format(used)} of ${format(limit)}`;
  return h(
    "div",
    {},
    h("span", {}, name),
    meter(share, `${name}: ${text}`),
    h("span", { class: "num" }, text, h("span", { class: "muted" }, ` ${percent(share)}`)),
  );
}

/** @param {Session} found */
function toolsOf({ recent_tools: recent = [], tools = {}, steps = {} }) {
  const counts = Object.entries(tools);
  const places = Object.entries(steps).filter(([, place]) => place.active_step);
  if (!recent.length && !counts.length && !places.length) return null;
  const inContext = (/** @type {{results: number, result_tokens: number}} */ one) =>
    `${many(one.results, "result")} of ${many(one.result_tokens, "token")} in the last call's context`;
  return h(
    "div",
    { class: "tools-used" },
    places
      .map(([agent, place]) => [
        h("h2", {}, agent === "default" ? "Step" : `Step of ${agent}`),
        h("p", {}, stepOf(place)),
      ])
      .flat(),
    counts.length
      ? [
          h("h2", {}, "Tools by number of calls"),
          h(
            "ul",
            { class: "chips" },
            counts.map(([name, one]) =>
              h(
                "li",
                {},
                h("span", { class: "badge mono", title: inContext(one) }, name, h("b", {}, ` ${number(one.calls)}`)),
              ),
            ),
          ),
        ]
      : null,
    recent.length
      ? [
          h("h2", {}, "Last tool calls"),
          h(
            "ol",
            { class: "chips arrows" },
            inRow(recent).map(([name, times]) =>
              h("li", {}, h("span", { class: "badge mono" }, name, times > 1 ? h("b", {}, ` ×${times}`) : null)),
            ),
          ),
        ]
      : null,
  );
}

/** @param {string | null} iso null: no call was charged */
function began(iso) {
  if (iso === null) return tile("Started", ago(iso));
  const day = h("time", { title: exact(iso), datetime: iso }, new Date(iso).toLocaleDateString());
  return tile("Started", day, clock(iso));
}

/** @param {import("../types.js").Step} place */
function stepOf(place) {
  const due = place.due ? `, due: ${place.due.join(" or ")}` : "";
  const at =
    place.sequence_index === null
      ? ""
      : `, ${number(place.sequence_index)} of ${number(place.sequence.length)} entries of its sequence done`;
  return [
    h("span", { class: "badge mono", title: place.description }, place.active_step),
    `${at}${due}${place.is_set ? ", set manually" : ""}`,
  ];
}
