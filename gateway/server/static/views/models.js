/**
 * The view of models: context windows, prices and their sources, and how accurate recent estimates were.
 * @module
 */
import { api } from "../api.js";
import { Chart } from "../chart.js";
import { fill, h, loading, notice } from "../dom.js";
import { compact, number, percent, timeOf } from "../format.js";
import { replace, to } from "../router.js";
import { Table, plain } from "../table.js";

/** @typedef {import("../types.js").Model} Model */
/** @typedef {import("../types.js").Call} Call */

const MOST = 1000;
const RECORDS = 1000;
const TYPED_MS = 250;

/**
 * @param {URLSearchParams} params
 * @returns {Promise<import("../types.js").View>}
 */
export async function models(params) {
  const part = params.get("q") ?? "";
  const field = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "search",
      id: "find",
      value: part,
      placeholder: "part of a name",
      spellcheck: "false",
      autocomplete: "off",
    })
  );
  const state = h("span", { class: "muted", role: "status" });
  const place = h("div", {}, loading());
  const errors = h("div", {}, loading());
  const table = new Table({ label: "Models", columns: columns(), key: (row) => row.model });
  /** @type {Chart[]} */
  const charts = [];
  let turn = 0;
  let isClosed = false;

  /** @param {string} wanted */
  async function load(wanted) {
    const mine = ++turn;
    const { models: rows } = await api(`api/models?limit=${MOST}&q=${encodeURIComponent(wanted)}`);
    if (mine !== turn) return;
    /** @type {Model[]} a model with two entries is listed once */
    const once = [...new Map(rows.map((/** @type {Model} */ row) => [row.model, row])).values()];
    fill(state, rows.length === MOST ? `the first ${number(once.length)}` : number(once.length));
    table.set(once);
    fill(
      place,
      rows.length
        ? table.element
        : notice(
            "No model with this name",
            "This list has the models of the configured providers. A model that is not listed can be called too, but its context window and price are unknown. Set them under models: in gateway.yaml.",
          ),
    );
    table.draw();
  }

  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      replace(to("models", "", { q: field.value.trim() }));
      load(field.value.trim()).catch((error) => fill(state, error.message));
    }, TYPED_MS);
  });
  await load(part);
  api(`api/calls?limit=${RECORDS}`, { quiet: true })
    .then(({ calls }) => isClosed || fill(errors, estimates(calls, charts)))
    .catch((error) => fill(errors, h("p", { class: "problem" }, error.message)));
  const element = h(
    "div",
    { class: "view" },
    h("div", { class: "title" }, h("h1", {}, "Models"), state),
    h("div", { class: "controls" }, h("label", { class: "find" }, h("span", {}, "Find "), field)),
    place,
    h("h2", {}, "Estimates against reported usage"),
    h(
      "p",
      { class: "muted" },
      `How many more input tokens the provider reported than the gateway estimated, for the newest ${number(RECORDS)} calls. Budgets and trimming use the estimate.`,
    ),
    errors,
  );
  const close = () => {
    turn++;
    isClosed = true;
    clearTimeout(timer);
    table.close();
    for (const chart of charts) chart.close();
  };
  return { title: "Models", element, close };
}

/** @param {Model} row */
function windowOf(row) {
  return row.input ? `${number(row.window)}, input at most ${number(row.input)}` : number(row.window);
}

/**
 * Return a price with all its digits; at least two after the point, if it has any.
 * @param {string | null | undefined} value
 */
function exactPrice(value) {
  return value ? `$${value.replace(/(\.\d)$/, "$10")}` : "–";
}

/** @returns {import("../table.js").Column<Model>[]} */
function columns() {
  const price = (/** @type {"input" | "output" | "cache_read" | "cache_write"} */ part) => (/** @type {Model} */ row) =>
    exactPrice(row.price?.[part]);
  const perMillion = "USD per million tokens";
  const sources = (/** @type {Model} */ row) => [...new Set(Object.values(row.sources))].join(", ");
  const detail = (/** @type {Model} */ row) =>
    Object.entries(row.sources)
      .map(([name, source]) => `${name}: ${source}`)
      .join("\n");
  return [
    { name: "Model", show: (row) => h("span", { class: "mono", title: row.model }, row.model) },
    { name: "Provider", width: "8rem", wide: true, show: (row) => row.provider },
    {
      name: "Window",
      width: "5rem",
      numeric: true,
      hint: "context window in tokens, output included",
      show: (row) => h("span", { title: windowOf(row) }, compact(row.window)),
    },
    {
      name: "Output",
      width: "5rem",
      numeric: true,
      wide: true,
      hint: "most output tokens of a call",
      show: (row) => h("span", { title: number(row.output) }, compact(row.output)),
    },
    { name: "In", width: "4.8rem", numeric: true, hint: `input, ${perMillion}`, show: price("input") },
    { name: "Out", width: "4.8rem", numeric: true, wide: true, hint: `output, ${perMillion}`, show: price("output") },
    {
      name: "Cached",
      width: "5rem",
      numeric: true,
      wide: true,
      hint: `input from the cache, ${perMillion}`,
      show: price("cache_read"),
    },
    {
      name: "Written",
      width: "5rem",
      numeric: true,
      wide: true,
      hint: `input written to the cache, ${perMillion}`,
      show: price("cache_write"),
    },
    {
      name: "Tokenizer",
      width: "8rem",
      wide: true,
      show: (row) => h("span", { class: "cut", title: row.tokenizer }, row.tokenizer ?? "–"),
    },
    {
      name: "Source",
      width: "15rem",
      wide: true,
      hint: "source of these numbers",
      show: (row) => h("span", { class: "cut", title: detail(row) }, sources(row)),
    },
  ];
}

/**
 * @param {Call[]} calls newest first
 * @param {Chart[]} charts receives the created charts
 */
function estimates(calls, charts) {
  /** @type {Map<string, {at: number, off: number}[]>} */
  const byModel = new Map();
  for (const { context, usage, usage_source: source, provider, model, started_at: at } of calls.toReversed()) {
    if (!context || !usage || source !== "provider" || !usage.input_tokens) continue;
    // In shadow mode the received request was sent unchanged.
    const expected = context.shadow ? context.original_tokens : context.tokens;
    const name = `${provider}/${model}`;
    byModel.set(name, [
      ...(byModel.get(name) ?? []),
      { at: Date.parse(at) / 1000, off: (usage.input_tokens - expected) / usage.input_tokens },
    ]);
  }
  if (!byModel.size)
    return notice(
      "No records yet",
      "They appear after a provider has reported the usage of a call whose tokens were counted.",
    );
  const names = [...byModel.keys()].sort((a, b) => (byModel.get(b)?.length ?? 0) - (byModel.get(a)?.length ?? 0));
  const chart = new Chart({
    title: "Reported tokens above or below the estimate",
    lines: [{ label: "difference", colour: "input", as: "dots", format: (value) => percent(value, 1), least: -3 }],
    time: true,
    formatX: (x) => timeOf(x),
    range: [null, null],
  });
  charts.push(chart);
  const draw = (/** @type {string} */ name) => {
    const points = byModel.get(name) ?? [];
    chart.set([points.map(({ at }) => at), points.map(({ off }) => off)]);
    select.title = name;
  };
  const select = /** @type {HTMLSelectElement} */ (
    h(
      "select",
      { id: "model" },
      names.map((name) => h("option", { value: name, title: name }, name)),
    )
  );
  select.addEventListener("change", () => draw(select.value));
  const rows = names.map((name) => {
    const offs = (byModel.get(name) ?? []).map(({ off }) => off);
    const sizes = offs.map(Math.abs).sort((a, b) => a - b);
    const at = (/** @type {number} */ share) =>
      percent(sizes[Math.min(sizes.length - 1, Math.floor(share * sizes.length))], 1);
    return [
      h("span", { class: "mono cut", title: name }, name),
      number(offs.length),
      at(0.5),
      at(0.95),
      percent(offs.reduce((sum, one) => sum + one, 0) / offs.length, 1),
    ];
  });
  draw(names[0]);
  return h(
    "div",
    { class: "charts" },
    h(
      "div",
      {},
      plain(
        "Error of the estimates, by model",
        [["Model"], ["Calls", "num"], ["Median", "num"], ["95 %", "num"], ["Mean", "num wide"]],
        rows,
      ),
    ),
    h("div", { class: "stack" }, h("label", { class: "find" }, h("span", {}, "Model "), select), chart.element),
  );
}
