/**
 * Tables of any length: only the rows in view, and some around them, are elements. All rows are equally high.
 * @module
 */
import { fill, h } from "./dom.js";

/** rows above and below those in view, so that the keyboard always has a next one */
const AROUND = 12;

/**
 * @template R
 * @typedef {object} Column
 * @property {string} name
 * @property {(row: R) => import("./dom.js").Child | import("./dom.js").Child[]} show
 * @property {string} [width] CSS; without it the column takes what is left
 * @property {string} [narrow] the width on a narrow screen, where it is another
 * @property {boolean} [numeric]
 * @property {boolean} [wide] only where there is room
 * @property {string} [hint] what the column holds
 */

/**
 * @template R
 * @typedef {object} Options
 * @property {string} label what is listed
 * @property {Column<R>[]} columns the first one holds the row's link
 * @property {(row: R) => string} key
 * @property {() => void} [onEnd] the last rows are nearly in view: more may be loaded
 * @property {(row: R) => string} [kind] a class of the row
 * @property {number} [rowHeight] pixels
 */

/** @template R */
export class Table {
  /** @param {Options<R>} options */
  constructor(options) {
    this.options = options;
    this.rowHeight = options.rowHeight ?? 32;
    /** @type {R[]} */
    this.rows = [];
    /** rows that are elements now @type {Map<string, {row: R, element: HTMLElement}>} */
    this.shown = new Map();
    this.above = spacer();
    this.below = spacer();
    this.body = h("tbody", {}, this.above, this.below);
    this.table = h("table", {}, h("caption", { class: "sr" }, options.label), h("thead", {}, this.head()), this.body);
    this.element = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": options.label }, this.table);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.move(event));
    this.body.addEventListener("click", (event) => this.open(event));
    this.sized = new ResizeObserver(() => this.draw());
    this.sized.observe(this.element);
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
   * Show these rows. Where one scrolled down, what was in view stays there.
   * @param {R[]} rows
   */
  set(rows) {
    const top = this.element.scrollTop;
    const first = this.rows[Math.floor(top / this.rowHeight)];
    this.rows = rows;
    this.table.setAttribute("aria-rowcount", String(rows.length + 1));
    this.draw();
    if (top < this.rowHeight || first === undefined) return;
    const key = this.options.key(first);
    const now = rows.findIndex((row) => this.options.key(row) === key);
    if (now >= 0) this.element.scrollTop = now * this.rowHeight + (top % this.rowHeight);
  }

  draw() {
    const { key, onEnd } = this.options;
    const height = this.element.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - AROUND);
    const last = Math.min(this.rows.length, Math.ceil((this.element.scrollTop + height) / this.rowHeight) + AROUND);
    const wanted = new Map();
    for (let index = first; index < last; index++) {
      const row = this.rows[index];
      // Keys are those of rows, but for a list that names one twice.
      const name = wanted.has(key(row)) ? `${key(row)} ${index}` : key(row);
      const old = this.shown.get(name);
      const element = old?.row === row ? old.element : this.rowOf(row);
      if (old && old.element !== element) this.swap(old.element, element);
      element.setAttribute("aria-rowindex", String(index + 2));
      wanted.set(name, { row, element });
    }
    for (const [name, { element }] of this.shown) if (!wanted.has(name)) element.remove();
    // Rows that stay are not moved: whoever has the focus keeps it.
    let next = this.above.nextSibling;
    for (const { element } of wanted.values()) {
      if (element === next) next = element.nextSibling;
      else this.body.insertBefore(element, next);
    }
    this.shown = wanted;
    tall(this.above, first * this.rowHeight);
    tall(this.below, (this.rows.length - last) * this.rowHeight);
    if (onEnd && last === this.rows.length) onEnd();
  }

  /**
   * @param {HTMLElement} old
   * @param {HTMLElement} element
   */
  swap(old, element) {
    const had = old.contains(document.activeElement);
    old.replaceWith(element);
    if (had) element.querySelector("a")?.focus();
  }

  /** @param {R} row */
  rowOf(row) {
    const cells = this.options.columns.map((column, index) =>
      h(index ? "td" : "th", { class: classes(column), ...(index ? {} : { scope: "row" }) }, column.show(row)),
    );
    const element = h("tr", { class: this.options.kind?.(row) }, cells);
    element.style.height = `${this.rowHeight}px`;
    return element;
  }

  /**
   * A click anywhere in a row follows its link.
   * @param {MouseEvent} event
   */
  open(event) {
    const target = /** @type {Element} */ (event.target);
    if (target.closest("a, button") || getSelection()?.toString()) return;
    target.closest("tr")?.querySelector("a")?.click();
  }

  /**
   * Up and down go from row to row, Home and End to the first and last.
   * @param {KeyboardEvent} event
   */
  move(event) {
    const at = this.index();
    const last = this.rows.length - 1;
    const goal = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (goal === undefined || last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.focus(Math.min(last, Math.max(0, goal)));
  }

  /** The row that has the focus; -1: none. */
  index() {
    const row = document.activeElement?.closest("tr");
    return row && this.body.contains(row) ? Number(row.getAttribute("aria-rowindex")) - 2 : -1;
  }

  /** @param {number} index */
  focus(index) {
    const head = /** @type {HTMLElement} */ (this.table.querySelector("thead")).offsetHeight;
    const top = index * this.rowHeight;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    if (top + this.rowHeight > scrollTop + clientHeight - head) {
      this.element.scrollTop = top + this.rowHeight - clientHeight + head;
    }
    this.draw();
    this.shown.get(this.options.key(this.rows[index]))?.element.querySelector("a")?.focus({ preventScroll: true });
  }

  close() {
    this.sized.disconnect();
  }
}

/** @param {Column<any>} column */
function classes(column) {
  return [column.numeric ? "num" : "", column.wide ? "wide" : ""].filter(Boolean).join(" ") || null;
}

/** What stands for the rows that are not drawn. One cell: more would be columns where some are hidden. */
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
 * A short table, all of it at once.
 * @param {string} label
 * @param {[string, string?][]} columns name, and its classes: `num`, `wide`
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
