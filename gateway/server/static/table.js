/**
 * Show tables of any length: only visible rows, and some around them, are elements. All rows have the same height.
 * @module
 */
import { fill, h } from "./dom.js";

/** Least width of a column without a width, which contains names of sessions or models. */
const LEAST = "16rem";
/** rows drawn above and below the visible ones, so that the keyboard can always reach a next one */
const AROUND = 12;
/** Narrow screens, as in the style sheet: rows with `below` have two lines. */
const NARROW = matchMedia("(max-width: 760px)");
const TWO_LINES = 52;

/**
 * @template R
 * @typedef {object} Column
 * @property {string} name
 * @property {(row: R) => import("./dom.js").Child | import("./dom.js").Child[]} show
 * @property {string} [width] CSS width; without it the column takes the remaining space
 * @property {string} [narrow] width on a narrow screen, if different
 * @property {boolean} [numeric]
 * @property {boolean} [wide] hidden on a narrow screen
 * @property {string} [hint] explanation of the column
 * @property {(row: R) => import("./dom.js").Child | import("./dom.js").Child[]} [below] second line on a narrow screen
 */

/**
 * @template R
 * @typedef {object} Options
 * @property {string} label description of the table
 * @property {Column<R>[]} columns the first column contains the row's link
 * @property {(row: R) => string} key
 * @property {() => void} [onEnd] called when the last rows are nearly visible, to load more
 * @property {(row: R) => string} [kind] CSS class of the row
 * @property {number} [rowHeight] pixels
 */

/** @template R */
export class Table {
  /** @param {Options<R>} options */
  constructor(options) {
    this.options = options;
    this.rowHeight = this.height;
    /** @type {R[]} */
    this.rows = [];
    /** rows that are drawn now @type {Map<string, {row: R, element: HTMLElement}>} */
    this.shown = new Map();
    this.above = spacer();
    this.below = spacer();
    this.body = h("tbody", {}, this.above, this.below);
    this.table = h("table", {}, h("caption", { class: "sr" }, options.label), h("thead", {}, this.head()), this.body);
    // Without a least width, columns without a width of their own would vanish in a narrow window.
    const widths = options.columns.map((column) => column.width ?? LEAST);
    this.table.style.setProperty("--least", `calc(${widths.join(" + ")})`);
    this.element = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": options.label }, this.table);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.move(event));
    this.body.addEventListener("click", (event) => this.open(event));
    this.sized = new ResizeObserver(() => this.draw());
    this.sized.observe(this.element);
    this.fitted = () => this.fit();
    NARROW.addEventListener("change", this.fitted);
  }

  get height() {
    return NARROW.matches && this.options.columns.some(({ below }) => below)
      ? TWO_LINES
      : (this.options.rowHeight ?? 32);
  }

  /** Draw all rows again with the height for this width. */
  fit() {
    const first = this.element.scrollTop / this.rowHeight;
    this.rowHeight = this.height;
    for (const { element } of this.shown.values()) element.style.height = `${this.rowHeight}px`;
    this.element.scrollTop = first * this.rowHeight;
    this.draw();
  }

  head() {
    return h(
      "tr",
      {},
      this.options.columns.map((column) => {
        const cell = h("th", { scope: "col", class: classes(column), title: column.hint }, column.name);
        if (column.width) cell.style.setProperty("--width", column.width);
        if (column.narrow) cell.style.setProperty("--narrow", column.narrow);
        return cell;
      }),
    );
  }

  /**
   * Set the rows. If the table was scrolled down, the visible rows stay in place. At the top, the focused row stays
   * visible.
   * @param {R[]} rows
   */
  set(rows) {
    const top = this.element.scrollTop;
    const focused = this.index();
    const held = focused >= 0 && this.placeOf(focused) === top ? this.rows[focused] : undefined;
    const first = top < this.rowHeight ? undefined : this.rows[Math.floor(top / this.rowHeight)];
    this.rows = rows;
    this.table.setAttribute("aria-rowcount", String(rows.length + 1));
    tall(this.below, rows.length * this.rowHeight); // makes the table high enough to scroll
    const now = this.find(first ?? held);
    if (now >= 0) this.element.scrollTop = first ? now * this.rowHeight + (top % this.rowHeight) : this.placeOf(now);
    this.draw();
  }

  /** @param {R | undefined} row */
  find(row) {
    const key = row && this.options.key(row);
    return row ? this.rows.findIndex((one) => this.options.key(one) === key) : -1;
  }

  draw() {
    const { key, onEnd } = this.options;
    const focused = document.activeElement;
    const held = [...this.shown].find(([, { element }]) => element.contains(focused))?.[0];
    const height = this.element.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - AROUND);
    const last = Math.min(this.rows.length, Math.ceil((this.element.scrollTop + height) / this.rowHeight) + AROUND);
    const wanted = new Map();
    for (let index = first; index < last; index++) {
      const row = this.rows[index];
      // A list may contain a row twice: the second one gets its own key.
      const name = wanted.has(key(row)) ? `${key(row)} ${index}` : key(row);
      const old = this.shown.get(name);
      const element = old?.row === row ? old.element : this.rowOf(row);
      if (old && old.element !== element) old.element.replaceWith(element);
      element.setAttribute("aria-rowindex", String(index + 2));
      wanted.set(name, { row, element });
    }
    for (const [name, { element }] of this.shown) if (!wanted.has(name)) element.remove();
    let next = this.above.nextSibling;
    for (const { element } of wanted.values()) {
      if (element === next) next = element.nextSibling;
      else this.body.insertBefore(element, next);
    }
    this.shown = wanted;
    if (held !== undefined && document.activeElement !== focused) {
      // The focused row was moved, redrawn or removed: focus its row, else the table.
      const row = wanted.get(held)?.element;
      const goal = row?.contains(focused) ? focused : (row?.querySelector("a") ?? this.element);
      goal.focus({ preventScroll: true });
    }
    tall(this.above, first * this.rowHeight);
    tall(this.below, (this.rows.length - last) * this.rowHeight);
    if (onEnd && last === this.rows.length) onEnd();
  }

  /** @param {R} row */
  rowOf(row) {
    const cells = this.options.columns.map((column, index) =>
      h(
        index ? "td" : "th",
        { class: classes(column), ...(index ? {} : { scope: "row" }) },
        column.show(row),
        column.below ? h("span", { class: "below" }, column.below(row)) : null,
      ),
    );
    const element = h("tr", { class: this.options.kind?.(row) }, cells);
    element.style.height = `${this.rowHeight}px`;
    return element;
  }

  /**
   * Follow the link of a row after a click anywhere in it.
   * @param {MouseEvent} event
   */
  open(event) {
    const target = /** @type {Element} */ (event.target);
    if (target.closest("a, button") || getSelection()?.toString()) return;
    target.closest("tr")?.querySelector("a")?.click();
  }

  /**
   * Move the focus: arrow keys by a row, page keys by the visible rows, Home and End to the first and last row.
   * @param {KeyboardEvent} event
   */
  move(event) {
    const focused = this.index();
    const last = this.rows.length - 1;
    const at = focused < 0 ? Math.ceil(this.element.scrollTop / this.rowHeight) : focused;
    const next = focused < 0 ? at : at + 1;
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.rowHeight) - 2);
    const goals = { ArrowDown: next, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: last };
    const goal = /** @type {Record<string, number>} */ (goals)[event.key];
    if (goal === undefined || last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.focus(Math.min(last, Math.max(0, goal)));
  }

  /** Return the index of the focused row, or -1. */
  index() {
    const row = document.activeElement?.closest("tr");
    return row && this.body.contains(row) ? Number(row.getAttribute("aria-rowindex")) - 2 : -1;
  }

  /**
   * Return the scroll position, nearest to the present one, at which a row is visible.
   * @param {number} index
   */
  placeOf(index) {
    const head = /** @type {HTMLElement} */ (this.table.querySelector("thead")).offsetHeight;
    const least = (index + 1) * this.rowHeight + head - this.element.clientHeight;
    return Math.min(index * this.rowHeight, Math.max(least, this.element.scrollTop));
  }

  /** @param {number} index */
  focus(index) {
    this.element.scrollTop = this.placeOf(index);
    this.draw();
    this.shown.get(this.options.key(this.rows[index]))?.element.querySelector("a")?.focus({ preventScroll: true });
  }

  close() {
    NARROW.removeEventListener("change", this.fitted);
    this.sized.disconnect();
  }
}

/** @param {Column<any>} column */
function classes(column) {
  return [column.numeric ? "num" : "", column.wide ? "wide" : ""].filter(Boolean).join(" ") || null;
}

/** Create a placeholder for rows that are not drawn. It has one cell: more would count as columns if some are hidden. */
function spacer() {
  return h("tr", { class: "spacer", "aria-hidden": "true", hidden: true }, h("td", {}));
}

/**
 * @param {HTMLElement} row
 * @param {number} height
 */
function tall(row, height) {
  row.hidden = height <= 0;
  /** @type {HTMLElement} */ (row.firstElementChild).style.height = `${Math.max(0, height)}px`;
}

/**
 * Create a short table with all rows drawn.
 * @param {string} label
 * @param {[string, string?][]} columns name and CSS classes: `num`, `wide`
 * @param {import("./dom.js").Child[][]} rows
 */
export function plain(label, columns, rows) {
  const kind = (/** @type {number} */ index) => columns[index][1] ?? null;
  const head = columns.map(([name], index) => h("th", { scope: "col", class: kind(index) }, name));
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      row.map((cell, index) =>
        h(index ? "td" : "th", { class: kind(index), ...(index ? {} : { scope: "row" }) }, cell),
      ),
    ),
  );
  const element = h("div", { class: "table short", tabindex: 0, role: "region", "aria-label": label });
  fill(
    element,
    h("table", {}, h("caption", { class: "sr" }, label), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
  return element;
}
