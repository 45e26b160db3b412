/**
 * Ask the user: for the key, or to confirm a change.
 * @module
 */
import { fill, h } from "./dom.js";

/**
 * Show a dialog until the user answers it. Escape returns null.
 * @template T
 * @param {string} title
 * @param {(close: (answer: T | null) => void) => HTMLElement[]} content
 * @returns {Promise<T | null>}
 */
export function dialog(title, content) {
  return new Promise((resolve) => {
    /** @type {T | null} */
    let answer = null;
    const before = document.activeElement;
    const element = /** @type {HTMLDialogElement} */ (h("dialog", { "aria-labelledby": "dialog-title" }));
    const close = (/** @type {T | null} */ given) => {
      answer = given;
      element.close();
    };
    element.append(h("h2", { id: "dialog-title" }, title), ...content(close));
    element.addEventListener("close", () => {
      element.remove();
      if (before instanceof HTMLElement) before.focus();
      resolve(answer);
    });
    document.body.append(element);
    element.showModal();
  });
}

/**
 * @param {string} reason why the key is asked for again
 * @returns {Promise<string | null>}
 */
export function askKey(reason) {
  return dialog("A key is needed", (close) => {
    const field = /** @type {HTMLInputElement} */ (
      h("input", { id: "key-field", type: "password", autocomplete: "off", required: true, spellcheck: "false" })
    );
    const problem = h("p", { class: "problem", role: "alert", hidden: !reason }, reason);
    const submitted = (/** @type {Event} */ event) => {
      event.preventDefault();
      const key = field.value.trim();
      const strange = /[^\x20-\xff]/u.exec(key);
      problem.hidden = !strange;
      if (strange) fill(problem, `A key cannot contain “${strange[0]}”. Copy the key again.`);
      else if (key) close(key);
    };
    return [
      h(
        "form",
        { onsubmit: submitted },
        problem,
        h(
          "p",
          {},
          "The admin key (auth.admin_key) shows all sessions and can change budgets. A client key, or a token of the identity provider in auth.jwt, shows its own sessions. The key is kept until this tab is closed.",
        ),
        h("label", { for: "key-field" }, "Key"),
        field,
        buttons(h("button", { type: "submit", class: "primary" }, "Use this key"), cancel(close)),
      ),
    ];
  });
}

/**
 * Do something after the user has confirmed it. After an error the dialog stays open and shows it.
 * @param {string} title
 * @param {string} text what will happen
 * @param {string} verb label of the button
 * @param {() => Promise<unknown>} act
 * @returns {Promise<boolean>} whether it was done
 */
export async function confirmed(title, text, verb, act) {
  const done = await dialog(title, (close) => {
    const problem = h("p", { class: "problem", role: "alert", hidden: true });
    const button = h("button", { type: "button", class: "primary" }, verb);
    button.addEventListener("click", () => attempt(button, problem, act, () => close(true)));
    return [h("p", {}, text), problem, buttons(button, cancel(close))];
  });
  return done === true;
}

/**
 * @param {HTMLElement} button disabled meanwhile
 * @param {HTMLElement} problem element that shows the error
 * @param {() => Promise<unknown>} act
 * @param {() => void} then
 */
export async function attempt(button, problem, act, then) {
  button.toggleAttribute("disabled", true);
  problem.hidden = true;
  try {
    await act();
    then();
  } catch (error) {
    problem.hidden = false;
    fill(problem, error instanceof Error ? error.message : String(error));
    button.toggleAttribute("disabled", false);
    button.focus();
  }
}

/** @param {(answer: null) => void} close */
export function cancel(close) {
  return h("button", { type: "button", onclick: () => close(null) }, "Cancel");
}

/** @param {...HTMLElement} items */
export function buttons(...items) {
  return h("div", { class: "buttons" }, items);
}
