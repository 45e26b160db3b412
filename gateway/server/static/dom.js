/**
 * Create and update elements. Text is always inserted as text nodes, so names chosen by clients cannot become markup.
 * @module
 */

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Create an element. Properties that start with `on` are listeners, `class` sets the classes, all others are
 * attributes (true: empty; false and null: none).
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...nodes(children));
  return element;
}

/**
 * Set the children of an element. Children that it already has are not removed and added again, which would lose the
 * focus and the scroll position.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function fill(element, ...children) {
  const wanted = nodes(children);
  wanted.forEach((child, index) => {
    const old = element.childNodes[index];
    if (!old) element.append(child);
    else if (old !== child && !isSameText(old, child)) old.replaceWith(child);
  });
  while (element.childNodes.length > wanted.length) element.lastChild?.remove();
}

/**
 * Set the children of an element without listeners. Unchanged elements stay, at any depth, with their focus, scroll
 * position and selection.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function renew(element, ...children) {
  fill(
    element,
    nodes(children).map((child, index) => {
      const old = element.childNodes[index];
      if (!(old instanceof Element) || !old.cloneNode().isEqualNode(child.cloneNode())) return child;
      renew(old, ...child.childNodes);
      return old;
    }),
  );
}

/**
 * @param {Node} one
 * @param {Node} other
 */
function isSameText(one, other) {
  return one instanceof Text && other instanceof Text && one.data === other.data;
}

/**
 * @param {(Child | Child[])[]} children
 * @returns {Node[]}
 */
function nodes(children) {
  return children
    .flat()
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "")
    .map((child) => (child instanceof Node ? child : new Text(String(child))));
}

/**
 * Create a group of buttons of which one is pressed.
 * @param {string} label
 * @param {[string, Child | Child[]][]} items name and label of each button
 * @param {(name: string) => void} choose
 */
export function choice(label, items, choose) {
  const buttons = items.map(([name, text]) =>
    h("button", { type: "button", "data-name": name, onclick: () => choose(name) }, text),
  );
  return {
    element: h("div", { class: "choice", role: "group", "aria-label": label }, buttons),
    /** @param {string} chosen */
    press(chosen) {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.name === chosen));
    },
  };
}

/**
 * Create a bar that shows the used share of a budget. It changes its colour when little is left.
 * @param {number} share 0 to 1; a larger share is drawn as full
 * @param {string} label describes it in words
 */
export function meter(share, label) {
  const kind = share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "";
  const value = h("span", {});
  value.style.width = `${Math.min(100, Math.max(0, share * 100)).toFixed(1)}%`;
  return h("span", { class: `meter ${kind}`, role: "img", "aria-label": label, title: label }, value);
}

/**
 * Create a tile: a number with its name.
 * @param {string} name
 * @param {Child | Child[]} value
 * @param {Child | Child[]} [note]
 */
export function tile(name, value, note = null) {
  return h(
    "div",
    { class: "tile" },
    h("dt", {}, name),
    h("dd", {}, h("span", { class: "value" }, value), note ? h("span", { class: "note" }, note) : null),
  );
}

/**
 * Create a notice: why there is nothing to show, and what to do.
 * @param {string} title
 * @param {Child | Child[]} text
 * @param {...Child} actions
 */
export function notice(title, text, ...actions) {
  return h(
    "div",
    { class: "notice" },
    h("h2", {}, title),
    h("p", {}, text),
    actions.length ? h("p", {}, actions) : null,
  );
}

/** @param {string} text */
export function loading(text = "Loading …") {
  return h("p", { class: "loading", role: "status" }, text);
}

/**
 * Create a list of names and values.
 * @param {[string, Child | Child[]][]} rows rows without a value are left out
 */
export function facts(rows) {
  const shown = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}
