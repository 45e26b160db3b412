/**
 * Draw charts with uPlot, in the page's colours. The legend shows the values under the pointer. uPlot is loaded with
 * the first chart. The page also shows the data of each chart as a table or as numbers.
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
 * @property {number} [least] smallest power of ten between two ticks of the axis; default 0, for whole numbers
 */

/**
 * @typedef {object} Options
 * @property {string} title
 * @property {Line[]} lines
 * @property {boolean} [time] x is a Unix time in seconds; else a number, such as the number of a call
 * @property {(x: number) => string} formatX
 * @property {string} [heading] element of the title; default `h3`
 * @property {number} [height]
 * @property {string} [sync] charts with the same name share their pointer
 * @property {(index: number) => void} [onPick] called after a click on a value
 * @property {[number | null, number | null]} [range] range of y; null: fits the values
 */

/** @typedef {(number | null)[][]} Data the x values, then the values of each line */

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
    this.labels = [];
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
    this.items = this.options.lines.map((line, index) => {
      const mark = h("span", { class: `mark ${line.dashed ? "dashed" : ""}` });
      mark.style.setProperty("--mark", `var(--${line.colour})`);
      return h("li", {}, mark, line.label, " ", this.values[index]);
    });
    return h("ul", { class: "legend" }, this.items, h("li", {}, this.at));
  }

  /**
   * @param {Data} data
   * @param {Data} [labels] values of the legend, if they differ from the drawn values: parts instead of sums
   */
  set(data, labels = data) {
    this.data = data;
    this.labels = labels;
    this.place.setAttribute("aria-label", this.summary());
    if (this.plot) this.plot.setData(data);
    else this.rebuild();
    // A line without any value is not drawn.
    this.items?.forEach((item, index) => (item.hidden = !labels[index + 1].some((value) => value !== null)));
    this.say(null);
  }

  /** Return a description of the chart in words. */
  summary() {
    const last = this.options.lines.map((line, index) => {
      const value = this.labels[index + 1]?.findLast((one) => one !== null);
      return `${line.label} ${line.format(value)}`;
    });
    return `${this.options.title}: ${this.data[0]?.length ?? 0} points; last values: ${last.join(", ")}`;
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
    const widthOf = (/** @type {string[]} */ texts) => widest(texts, font);
    const labelled = (/** @type {string} */ scale) => {
      const { format, least } = /** @type {Line} */ (lines.find((line) => (line.scale ?? "y") === scale));
      return {
        ...axis,
        scale,
        incrs: steps(least),
        values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => format(tick)),
        size: (/** @type {any} */ _, /** @type {string[] | null} */ texts) => 10 + widthOf(texts ?? []),
      };
    };
    const numbers = (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => formatX(tick));
    // A label is centred below its value. The last label needs space on its right.
    const half = () => Math.ceil(widthOf([formatX(this.data[0]?.at(-1) ?? 0)]) / 2) + 2;
    const range = this.options.range ?? [0, null];
    return {
      width: this.place.clientWidth,
      height: this.height,
      padding: [8, hasRight ? 0 : half, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 5 }, drag: { x: true, y: false }, ...(sync ? { sync: { key: sync } } : {}) },
      scales: {
        x: { time: Boolean(time), range: beside(time ? 0 : 0.6) },
        y: { range: around(range) },
        ...(hasRight ? { right: { range: around(range) } } : {}),
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          size: 32,
          gap: 8,
          space: 70,
          ...(time ? { values: times } : { incrs: steps(), values: numbers }),
        },
        labelled("y"),
        ...(hasRight ? [{ ...labelled("right"), side: 1, grid: { show: false } }] : []),
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
   * Show the values at an index in the legend; null: the last values.
   * @param {number | null} index
   */
  say(index) {
    const [xs] = this.data;
    if (!xs?.length) return;
    const at = index ?? xs.length - 1;
    this.options.lines.forEach((line, number) => fill(this.values[number], line.format(this.labels[number + 1][at])));
    fill(this.at, this.options.formatX(/** @type {number} */ (xs[at])));
  }

  close() {
    document.removeEventListener("gateway:theme", this.recolour);
    this.sized.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}

/**
 * Return the allowed distances between two ticks of an axis.
 * @param {number} [least] a power of ten
 */
function steps(least = 0) {
  const powers = Array.from({ length: 16 - least }, (_, index) => least + index);
  // Parsed from text, because uPlot compares exact values.
  return powers.flatMap((power) => [1, 2, 5].map((one) => Number(`${one}e${power}`)));
}

const ruler = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));

/**
 * @param {string[]} texts
 * @param {string} font
 */
function widest(texts, font) {
  ruler.font = font;
  return Math.ceil(Math.max(0, ...texts.map((text) => ruler.measureText(text).width)));
}

/**
 * @param {any} _
 * @param {number[]} ticks
 */
function times(_, ticks) {
  const isShort = ticks.length < 2 || ticks[1] - ticks[0] >= 60;
  return ticks.map((tick) => timeOf(tick, isShort));
}

/**
 * Add space on both sides, such as for half a bar. A single value is centred.
 * @param {number} room
 */
function beside(room) {
  return (/** @type {any} */ plot, /** @type {number} */ least, /** @type {number} */ most) => {
    const [first, next] = plot.data[0];
    if (next !== undefined) return [least - room, most + room];
    return [first - (room || 60), first + (room || 60)];
  };
}

/** @param {[number | null, number | null]} fixed */
function around([low, high]) {
  return (/** @type {any} */ _, /** @type {number | null} */ least, /** @type {number | null} */ most) => {
    const bottom = low ?? Math.min(0, (least ?? 0) * 1.08);
    const top = high ?? Math.max(0, (most ?? 0) * 1.08);
    return [bottom, top > bottom ? top : 1];
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
    // A single value makes no line.
    points: { show: (/** @type {any} */ plot) => plot.data[0].length === 1, size: 6, fill: colour },
  };
  switch (line.as) {
    case "bars":
      return {
        ...common,
        width: 0,
        fill: colour,
        points: { show: false },
        paths: Plot.paths.bars({ size: [0.75, 24, 1.5] }),
      };
    case "steps":
      return { ...common, paths: Plot.paths.stepped({ align: 1 }), ...(line.dashed ? { dash: [5, 4] } : {}) };
    case "dots":
      return { ...common, paths: () => null, points: { show: true, size: 5, fill: colour, stroke: colour } };
    default:
      if (line.dashed) return { ...common, dash: [5, 4], points: { show: false }, paths: limit(Plot) };
      return { ...common, ...(line.filled ? { fill: `${colour}26` } : {}) };
  }
}

/**
 * Draw a line. A single value makes a line across the whole chart.
 * @param {any} Plot
 */
function limit(Plot) {
  const linear = Plot.paths.linear();
  return (
    /** @type {any} */ plot,
    /** @type {number} */ index,
    /** @type {number} */ from,
    /** @type {number} */ to,
  ) => {
    const [value, next] = plot.data[index];
    if (next !== undefined || value === null) return linear(plot, index, from, to);
    const { left, width } = plot.bbox;
    const y = plot.valToPos(value, plot.series[index].scale, true);
    const stroke = new Path2D();
    stroke.moveTo(left, y);
    stroke.lineTo(left + width, y);
    return { stroke };
  };
}
