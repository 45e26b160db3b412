/**
 * Show how much of a budget is used. Change the budget of a session, or reset its totals, after a confirmation.
 * @module
 */
import { send, sessionPath } from "../api.js";
import { attempt, buttons, cancel, confirmed, dialog } from "../dialogs.js";
import { fill, h, meter } from "../dom.js";
import { number, percent, usd } from "../format.js";

/** @typedef {import("../types.js").Session} Session */
/**
 * @typedef {{name: "tokens" | "usd" | "calls", text: string, step: string, format: (value: number | null) => string}} Unit
 */

/** @type {Unit[]} */
const UNITS = [
  { name: "tokens", text: "Tokens", step: "1", format: number },
  { name: "usd", text: "US dollars", step: "any", format: usd },
  { name: "calls", text: "Calls", step: "1", format: number },
];

/**
 * Create the cell of a list that shows the used share of a budget.
 * @param {{used_fraction: number} | null} budget
 */
export function budgetCell(budget) {
  if (!budget) return h("span", { class: "muted" }, "none");
  const used = percent(budget.used_fraction);
  return h("span", { class: "budget" }, meter(budget.used_fraction, `${used} of the budget is used`), h("span", {}, used));
}

/**
 * Ask for new limits, show what they change, and set them.
 * @param {Session} session
 * @param {() => void} then
 */
export async function changeBudget(session, then) {
  const budget = session.budget;
  const done = await dialog(`Budget of ${session.id}`, (close) => {
    const problem = h("p", { class: "problem", role: "alert", hidden: true });
    const fields = UNITS.map((unit) => field(unit, budget?.[unit.name] ?? null, usedOf(session, unit.name)));
    const review = h("div", {});
    const form = h(
      "form",
      { novalidate: true },
      h("p", {}, "Limits of this session only. An empty field means no limit. They apply from the next call."),
      fields.map((one) => one.element),
    );
    const actions = buttons(
      h("button", { type: "submit", class: "primary" }, "Review"),
      h(
        "button",
        { type: "button", onclick: () => show({ tokens: null, usd: null, calls: null }) },
        "Remove all limits",
      ),
      h("button", { type: "button", onclick: () => show("default") }, "As configured"),
      cancel(close),
    );
    form.append(problem, actions);

    /** @param {Record<string, number | null> | "default"} limits */
    function show(limits) {
      form.hidden = true;
      const fault = h("p", { class: "problem", role: "alert", hidden: true });
      const set = h("button", { type: "button", class: "primary" }, "Set this budget");
      set.addEventListener("click", () =>
        attempt(
          set,
          fault,
          () => send("PATCH", sessionPath(session.id), { budget: limits }),
          () => close(true),
        ),
      );
      const back = h("button", { type: "button", onclick: () => ((form.hidden = false), fill(review)) }, "Back");
      fill(
        review,
        h("p", {}, "Changes:"),
        h(
          "ul",
          {},
          changes(session, limits).map((line) => h("li", {}, line)),
        ),
        fault,
        buttons(set, back, cancel(close)),
      );
      set.focus();
    }

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const wrong = fields.find((one) => one.problem());
      problem.hidden = !wrong;
      if (wrong) {
        fill(problem, /** @type {string} */ (wrong.problem()));
        wrong.input.focus();
        return;
      }
      const asked = Object.fromEntries(fields.filter((one) => one.isChanged()).map((one) => [one.name, one.value()]));
      if (Object.keys(asked).length) show(asked);
      else {
        problem.hidden = false;
        fill(problem, "Nothing was changed. Enter a new limit in a field.");
      }
    });
    return [form, review];
  });
  if (done) then();
}

/**
 * Return the used amount that a limit would be compared with, or null if it is unknown. A session counts its usage even
 * before it has a budget.
 * @param {Session} session
 * @param {Unit["name"]} unit
 */
function usedOf({ budget, used_with_children: used, cost_usd: cost }, unit) {
  if (budget) return Number(budget.used[unit]);
  if (unit !== "usd") return used[unit];
  return cost === null ? null : Number(cost);
}

/**
 * @param {Unit} unit
 * @param {string | number | null} limit
 * @param {number | null} used
 */
function field(unit, limit, used) {
  const id = `budget-${unit.name}`;
  const before = limit === null ? "" : String(Number(limit));
  const input = /** @type {HTMLInputElement} */ (
    h("input", {
      id,
      type: "number",
      min: 0,
      step: unit.step,
      value: before,
      placeholder: "no limit",
      inputmode: "decimal",
      "aria-describedby": `${id}-used`,
    })
  );
  const raise = (/** @type {number} */ factor, /** @type {string} */ text) =>
    h(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-label": `${unit.text} ${text}`,
        onclick: () =>
          (input.value = String(unit.name === "usd" ? Number(before) * factor : Math.round(Number(before) * factor))),
      },
      text,
    );
  const isBad = () =>
    input.validity.badInput || Number(input.value) < 0 || (unit.step === "1" && !Number.isInteger(Number(input.value)));
  return {
    name: unit.name,
    input,
    element: h(
      "div",
      { class: "field" },
      h("label", { for: id }, unit.text),
      input,
      h("span", { class: "muted", id: `${id}-used` }, `used ${unit.format(used)}`),
      before ? h("span", {}, raise(1.5, "+50 %"), raise(2, "×2")) : null,
    ),
    isChanged: () => input.value !== before || input.validity.badInput,
    value: () => (input.value === "" ? null : Number(input.value)),
    problem: () =>
      isBad()
        ? `${unit.text}: enter a ${unit.step === "1" ? "whole " : ""}number, 0 or more, or leave it empty for no limit.`
        : null,
  };
}

/**
 * @param {Session} session
 * @param {Record<string, number | null> | "default"} asked
 */
function changes(session, asked) {
  if (asked === "default")
    return ["The limits that were set for this session are removed. The configured limits apply."];
  return UNITS.filter((unit) => unit.name in asked).map((unit) => {
    const old = session.budget?.[unit.name] ?? null;
    const limit = asked[unit.name];
    const shown = (/** @type {string | number | null} */ value) =>
      value === null ? "no limit" : unit.format(Number(value));
    const used = usedOf(session, unit.name);
    const warning =
      limit !== null && used !== null && limit <= used ? " – less than already used: further calls are refused" : "";
    return `${unit.text}: ${shown(old)} → ${shown(limit)}${warning}`;
  });
}

/**
 * @param {Session} session
 * @param {() => void} then
 */
export async function resetSession(session, then) {
  const text = "The totals and the used budget are set to zero. The call records stay. This cannot be undone.";
  const act = () => send("POST", `${sessionPath(session.id)}/reset`);
  if (await confirmed(`Reset ${session.id}?`, text, "Reset", act)) then();
}

/**
 * @param {Session} session
 * @param {() => void} then
 */
export async function resumeSession(session, then) {
  const text =
    "Calls that runaway protection refuses are allowed again. What the agent repeated so far no longer counts, and limits in seconds begin again.";
  const act = () => send("POST", `${sessionPath(session.id)}/resume`);
  if (await confirmed(`Resume ${session.id}?`, text, "Resume", act)) then();
}
