/**
 * Charts by uPlot, in the page's colours, with a legend that says the values under the pointer. uPlot is loaded when
 * the first one is drawn. What a chart shows also stands in a table or in numbers beside it.
 * @module
 */
import { fill, h } from "./dom.js";
import { timeOf } from "./format.js";

/**
 * @typedef {object} Line
 * @property {string} label
 * @property {string} colour the name of a colour in the style sheet
 * @property {"bars" | "line" | "steps" | "dots"} [as]
 * @property {"y" | "right"} [scale]
 * @property {boolean} [dashed]
 * @property {boolean} [filled]
 * @property {(value: number | null | undefined) => string} format
 */

/**
 * @typedef {object} Options
 * @property {string} title
 * @property {Line[]} lines
 * @property {boolean} [time] x is in seconds since the epoch; else a number such as that of a call
 * @property {(x: number) => string} formatX
 * @property {string} [heading] its element, `h3` where nothing else is said
 * @property {number} [height]
 * @property {string} [sync] charts of one name share their pointer
 * @property {(index: number) => void} [onPick] a click on the place of a value
 * @property {[number | null, number | null]} [range] of y, where it is not what the values need
 */

/** @typedef {(number | null)[][]} Data the x values, then those of each line */

/** @type {Promise<any> | null} */
let library = null;

function uPlot() {
  library ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("vendor/uPlot.min.js", import.meta.url).href;
    const sheet = document.createElement("link");
    sheet.rel = "stylesheet";
    sheet.href = new URL("vendor/uPlot.min.css", import.meta.url).href;
    script.onload = () => resolve(/** @type {any} */ (globalThis).uPlot);
    script.onerror = () => reject(new Error("The charts could not be loaded. Reload the page."));
    document.head.append(sheet, script);
  });
  return library;
}

export class Chart {
  /** @param {Options} options */
  constructor(options) {
    this.options = options;
    /** @type {Data} */
    this.data = [];
    /** @type {Data} */
    this.said = [];
    /** @type {any} */
    this.plot = null;
    this.values = options.lines.map(() => h("span", { class: "value" }));
    this.at = h("span", { class: "at" });
    this.place = h("div", { class: "plot", role: "img", "aria-label": options.title });
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, h(options.heading ?? "h3", {}, options.title), this.legend()),
      this.place,
    );
    this.sized = new ResizeObserver(() => this.resize());
    this.sized.observe(this.place);
    this.recolour = () => this.rebuild();
    document.addEventListener("gateway:theme", this.recolour);
  }

  legend() {
    const items = this.options.lines.map((line, index) => {
      const mark = h("span", { class: `mark ${line.dashed ? "dashed" : ""}` });
      mark.style.setProperty("--mark", `var(--${line.colour})`);
      return h("li", {}, mark, line.label, " ", this.values[index]);
    });
    return h("ul", { class: "legend" }, items, h("li", {}, this.at));
  }

  /**
   * @param {Data} data
   * @param {Data} [said] what the legend says, where that is not what is drawn: parts instead of sums
   */
  set(data, said = data) {
    this.data = data;
    this.said = said;
    this.place.setAttribute("aria-label", this.summary());
    if (this.plot) this.plot.setData(data);
    else this.rebuild();
    this.say(null);
  }

  /** The chart in words. */
  summary() {
    const last = this.options.lines.map((line, index) => {
      const value = this.said[index + 1]?.findLast((one) => one !== null);
      return `${line.label} ${line.format(value)}`;
    });
    return `${this.options.title}: ${this.data[0]?.length ?? 0} points; the last: ${last.join(", ")}`;
  }

  async rebuild() {
    const Plot = await uPlot();
    this.plot?.destroy();
    this.plot = null;
    if (!this.place.isConnected || !this.place.clientWidth || !this.data.length) return;
    this.plot = new Plot(this.settings(Plot), this.data, this.place);
  }

  resize() {
    const width = this.place.clientWidth;
    if (!width) return;
    if (!this.plot) this.rebuild();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: this.height });
  }

  get height() {
    return this.options.height ?? 180;
  }

  /** @param {any} Plot */
  settings(Plot) {
    const { lines, time, formatX, sync } = this.options;
    const style = getComputedStyle(document.documentElement);
    const colour = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
    const font = `11px ${style.getPropertyValue("--font").trim() || "sans-serif"}`;
    const axis = { stroke: colour("muted"), font, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    const hasRight = lines.some((line) => line.scale === "right");
    const formatOf = (/** @type {string} */ scale) =>
      lines.find((line) => (line.scale ?? "y") === scale)?.format ?? String;
    const labels = (/** @type {string} */ scale) => (/** @type {any} */ _, /** @type {number[]} */ ticks) =>
      ticks.map((tick) => formatOf(scale)(tick));
    const numbers = (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => formatX(tick));
    const range = this.options.range ?? [0, null];
    return {
      width: this.place.clientWidth,
      height: this.height,
      padding: [8, hasRight ? 0 : 12, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 5 }, drag: { x: true, y: false }, ...(sync ? { sync: { key: sync } } : {}) },
      scales: {
        x: { time: Boolean(time), ...(time ? {} : { range: wholeRange }) },
        y: { range: around(range) },
        ...(hasRight ? { right: { range: around(range) } } : {}),
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          size: 28,
          ...(time ? { values: times } : { incrs: WHOLE, values: numbers }),
        },
        { ...axis, size: 54, values: labels("y") },
        ...(hasRight
          ? [{ ...axis, side: 1, scale: "right", size: 54, grid: { show: false }, values: labels("right") }]
          : []),
      ],
      series: [{}, ...lines.map((line) => lineSettings(Plot, line, colour(line.colour)))],
      hooks: {
        setCursor: [(/** @type {any} */ plot) => this.say(plot.cursor.idx ?? null)],
        ready: [(/** @type {any} */ plot) => this.pickable(plot)],
      },
    };
  }

  /** @param {any} plot */
  pickable(plot) {
    const { onPick } = this.options;
    if (!onPick) return;
    plot.over.classList.add("pickable");
    plot.over.addEventListener("click", () => {
      if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) onPick(plot.cursor.idx);
    });
  }

  /**
   * Say the values at a place; without one the last ones.
   * @param {number | null} index
   */
  say(index) {
    const [xs] = this.data;
    if (!xs?.length) return;
    const at = index ?? xs.length - 1;
    this.options.lines.forEach((line, number) => fill(this.values[number], line.format(this.said[number + 1][at])));
    fill(this.at, this.options.formatX(/** @type {number} */ (xs[at])));
  }

  close() {
    document.removeEventListener("gateway:theme", this.recolour);
    this.sized.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000];

/**
 * @param {any} _
 * @param {number[]} ticks
 */
function times(_, ticks) {
  const isShort = ticks.length < 2 || ticks[1] - ticks[0] >= 60;
  return ticks.map((tick) => timeOf(tick, isShort));
}

/**
 * Room for half a bar on either side.
 * @param {any} _
 * @param {number} least
 * @param {number} most
 */
function wholeRange(_, least, most) {
  return [least - 0.6, most + 0.6];
}

/** @param {[number | null, number | null]} fixed */
function around([low, high]) {
  return (/** @type {any} */ _, /** @type {number | null} */ least, /** @type {number | null} */ most) => {
    const top = high ?? (most ? most * 1.08 : 1);
    return [low ?? Math.min(0, (least ?? 0) * 1.08), top];
  };
}

/**
 * @param {any} Plot
 * @param {Line} line
 * @param {string} colour
 */
function lineSettings(Plot, line, colour) {
  const common = {
    label: line.label,
    scale: line.scale ?? "y",
    stroke: colour,
    width: 1.5,
    spanGaps: true,
    points: { show: false },
  };
  switch (line.as) {
    case "bars":
      return { ...common, width: 0, fill: colour, paths: Plot.paths.bars({ size: [0.75, 24, 1.5] }) };
    case "steps":
      return { ...common, paths: Plot.paths.stepped({ align: 1 }), ...(line.dashed ? { dash: [5, 4] } : {}) };
    case "dots":
      return { ...common, paths: () => null, points: { show: true, size: 5, fill: colour, stroke: colour } };
    default:
      return { ...common, ...(line.dashed ? { dash: [5, 4] } : {}), ...(line.filled ? { fill: `${colour}26` } : {}) };
  }
}
