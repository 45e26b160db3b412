/**
 * The list of sessions: sorted by last call, tokens or cost, and searched by a part of the id.
 * @module
 */
import { api } from "../api.js";
import { choice, fill, h, loading, notice } from "../dom.js";
import { feed } from "../feed.js";
import { ago, compact, many, number, percent, usd } from "../format.js";
import { replace, to } from "../router.js";
import { Table } from "../table.js";
import { budgetCell } from "./budget.js";
import { sessionLink, tagOf } from "./calls.js";
import { Filters } from "./filters.js";

/** @typedef {import("../types.js").Session} Session */

const PAGE = 200;
/** larger, because the gateway reads many sessions for each page sorted by cost */
const COST_PAGE = 1000;
const TYPED_MS = 250;
const RENEW_MS = 3000;
const SORTS = /** @type {[string, string][]} */ ([
  ["recent", "Last call"],
  ["tokens", "Tokens"],
  ["cost", "Cost"],
]);

/**
 * @param {URLSearchParams} params
 * @returns {Promise<import("../types.js").View>}
 */
export async function sessions(params) {
  const list = new List(params);
  await list.load();
  list.start();
  return { title: "Sessions", element: list.element, update: (next) => list.update(next), close: () => list.close() };
}

class List {
  /** @param {URLSearchParams} params */
  constructor(params) {
    const sort = params.get("sort") ?? "recent";
    const part = params.get("q") ?? "";
    this.filters = new Filters(["key", "since"], params, () => this.show());
    this.sort = SORTS.some(([name]) => name === sort) ? sort : "recent";
    this.part = part;
    /** @type {Session[]} */
    this.rows = [];
    /** @type {string | null} */
    this.cursor = null;
    this.turn = 0;
    this.isLoading = false;
    this.isStale = false;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.table = new Table({ label: "Sessions", columns: columns(), key: (row) => row.id, onEnd: () => this.more() });
    this.place = h("div", {});
    this.state = h("span", { class: "muted", role: "status" });
    this.field = /** @type {HTMLInputElement} */ (
      h("input", {
        type: "search",
        id: "find",
        value: part,
        placeholder: "part of an id",
        spellcheck: "false",
        autocomplete: "off",
      })
    );
    this.field.addEventListener("input", () => this.typed());
    this.order = choice("Order", SORTS, (name) => this.go(name, this.part));
    this.order.press(this.sort);
    this.element = h(
      "div",
      { class: "view" },
      h("div", { class: "title" }, h("h1", {}, "Sessions"), this.state),
      h(
        "div",
        { class: "controls" },
        h("label", { class: "find" }, h("span", {}, "Find "), this.field),
        this.order.element,
      ),
      this.filters.element,
      this.place,
    );
    this.stop = () => {};
  }

  /** Update the list regularly until the view is closed. */
  start() {
    const stopHearing = feed.onCalls(() => (this.isStale = true));
    const renewing = setInterval(() => this.renew(), RENEW_MS);
    this.stop = () => {
      stopHearing();
      clearInterval(renewing);
    };
  }

  typed() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.go(this.sort, this.field.value.trim()), TYPED_MS);
  }

  /** @param {URLSearchParams} params */
  update(params) {
    const part = params.get("q") ?? "";
    if (part !== this.part) this.field.value = part;
    const isChanged = this.filters.set(params);
    this.go(params.get("sort") ?? "recent", part, isChanged);
  }

  /**
   * @param {string} sort
   * @param {string} part
   * @param {boolean} [isChanged] a filter was changed
   */
  async go(sort, part, isChanged = false) {
    if (sort === this.sort && part === this.part && !isChanged) return;
    this.sort = sort;
    this.part = part;
    await this.show();
  }

  /** Show the first page of the list. */
  async show() {
    replace(
      to("sessions", "", { sort: this.sort === "recent" ? "" : this.sort, q: this.part, ...this.filters.values }),
    );
    this.order.press(this.sort);
    this.table.element.scrollTop = 0;
    fill(this.place, loading());
    try {
      await this.load();
    } catch (error) {
      fill(this.place, notice("The data could not be loaded", error instanceof Error ? error.message : String(error)));
    }
  }

  get size() {
    return this.sort === "cost" ? COST_PAGE : PAGE;
  }

  /**
   * @param {string | null} cursor
   * @param {import("../api.js").Options} [options]
   */
  page(cursor, options) {
    const query = this.filters.query();
    query.set("limit", String(this.size));
    query.set("sort", this.sort);
    if (this.part) query.set("q", this.part);
    if (cursor) query.set("cursor", cursor);
    return api(`api/sessions?${query}`, options);
  }

  /** Load the first page. */
  async load() {
    const mine = ++this.turn;
    this.isStale = false;
    const page = await this.page(null);
    if (mine !== this.turn) return;
    this.rows = page.sessions;
    this.cursor = page.cursor;
    this.draw();
  }

  /** Load the next page, if there is one. */
  async more() {
    if (this.isLoading || this.cursor === null) return;
    this.isLoading = true;
    const mine = this.turn;
    try {
      const page = await this.page(this.cursor, { quiet: true });
      if (mine !== this.turn) return;
      const known = new Set(this.rows.map((row) => row.id));
      this.rows = [...this.rows, ...page.sessions.filter((/** @type {Session} */ row) => !known.has(row.id))];
      this.cursor = page.cursor;
    } catch (error) {
      fill(this.state, error instanceof Error ? error.message : String(error));
      return; // scrolling further tries again
    } finally {
      this.isLoading = false;
    }
    this.draw();
  }

  /** Load the first page again if there were new calls and the list is not scrolled down. */
  async renew() {
    const isBusy = () => this.isLoading || document.hidden || this.table.element.scrollTop > 0;
    if (!this.isStale || isBusy()) return;
    this.isStale = false;
    const mine = this.turn;
    try {
      const page = await this.page(null, { quiet: true });
      if (mine !== this.turn) return;
      this.isStale = isBusy();
      if (this.isStale) return;
      const before = new Map(this.rows.map((row) => [row.id, row]));
      // Unchanged rows are not drawn again.
      this.rows = page.sessions.map((/** @type {Session} */ row) => same(before.get(row.id), row));
      this.cursor = page.cursor;
      this.draw();
    } catch {
      this.isStale = true; // the feed shows that the gateway does not respond
    }
  }

  draw() {
    const { length } = this.rows;
    const more = this.cursor === null ? "" : ", more below";
    const bound = this.sort === "cost" ? ", of the 10,000 called last" : "";
    fill(this.state, length ? `${number(length)}${more}${bound}` : "");
    this.table.set(this.rows);
    if (length) fill(this.place, this.table.element);
    else fill(this.place, this.nothing());
    if (length) this.table.draw();
    else if (this.cursor !== null) this.more();
  }

  nothing() {
    if (this.cursor !== null) return loading("Searching older sessions …");
    if (this.filters.size)
      return notice("No session found", "No session has all these values. Remove a filter, or choose a longer time.");
    if (this.part)
      return notice(
        "No session found",
        `No stored session has “${this.part}” in its id. Sessions are deleted some time after their last call (sessions.ttl).`,
      );
    return notice(
      "No sessions yet",
      `Connect a client to ${location.origin}/v1 and name its session in the header x-session-id.`,
    );
  }

  close() {
    this.turn++;
    this.stop();
    clearTimeout(this.timer);
    this.table.close();
  }
}

/**
 * @param {Session | undefined} old
 * @param {Session} row
 */
function same(old, row) {
  return old && JSON.stringify(old) === JSON.stringify(row) ? old : row;
}

/** @returns {import("../table.js").Column<Session>[]} */
function columns() {
  // The newest calls tell the tag of a session.
  const tag = (/** @type {Session} */ row) => feed.calls.find((call) => call.session === row.id)?.labels?.tag;
  const name = (/** @type {Session} */ row) =>
    sessionLink(
      row.id,
      tag(row),
      row.derived_id
        ? h(
            "span",
            {
              class: "badge",
              title: "The client named no session. The id was derived from the start of the conversation.",
            },
            "derived",
          )
        : null,
    );
  const usage = (/** @type {Session} */ row) => row.cumulative_token_usage;
  return [
    {
      name: "Session",
      show: name,
      below: (row) => `${many(row.calls, "call")}, ${compact(usage(row).total_tokens)} tokens${tagOf(tag(row)) ?? ""}`,
    },
    {
      name: "Last call",
      width: "6.6rem",
      narrow: "6rem",
      show: (row) => ago(row.last_call_at),
      below: (row) => usd(row.cost_usd),
    },
    { name: "Calls", width: "4.4rem", numeric: true, wide: true, show: (row) => number(row.calls) },
    {
      name: "Tokens",
      width: "5rem",
      numeric: true,
      wide: true,
      show: (row) => h("span", { title: number(usage(row).total_tokens) }, compact(usage(row).total_tokens)),
    },
    {
      name: "Output",
      width: "5rem",
      numeric: true,
      wide: true,
      show: (row) => h("span", { title: number(usage(row).output_tokens) }, compact(usage(row).output_tokens)),
    },
    {
      name: "Cached",
      width: "5.2rem",
      numeric: true,
      wide: true,
      hint: "share of the input from the provider's cache",
      show: (row) => percent(usage(row).input_tokens ? usage(row).cache_read_tokens / usage(row).input_tokens : null),
    },
    {
      name: "Saved",
      width: "5rem",
      numeric: true,
      wide: true,
      hint: "input tokens that trimming removed",
      show: (row) => (row.saved_by_trimming.input_tokens ? compact(row.saved_by_trimming.input_tokens) : "–"),
    },
    { name: "Cost", width: "6.6rem", numeric: true, wide: true, show: (row) => usd(row.cost_usd) },
    { name: "Budget", width: "9rem", narrow: "4.9rem", show: (row) => budgetCell(row.budget) },
    {
      name: "Mode",
      width: "8rem",
      wide: true,
      hint: "response mode: how much of a tool result is sent to the model",
      show: (row) => h("span", { class: `badge mode-${row.response_mode}` }, row.response_mode.replace("_", " ")),
    },
  ];
}
