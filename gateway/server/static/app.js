/**
 * The frame of the page: the current view, the state of the feed, the colours, the key.
 * @module
 */
import { ApiError, askWith, enterKey, forgetKey, hasKey } from "./api.js";
import { askKey } from "./dialogs.js";
import { fill, h, loading, notice } from "./dom.js";
import { feed } from "./feed.js";
import { keepTimes } from "./format.js";
import { here } from "./router.js";

/** @typedef {import("./types.js").View} View */

/** @type {Record<string, (id: string, params: URLSearchParams) => Promise<View>>} each is loaded when it is shown for the first time */
const VIEWS = {
  live: async () => (await import("./views/live.js")).live(),
  sessions: async (_, params) => (await import("./views/sessions.js")).sessions(params),
  session: async (id, params) => (await import("./views/session.js")).session(id, params),
  call: async (id) => (await import("./views/call.js")).call(id),
  keys: async (name) => {
    const views = await import("./views/keys.js");
    return name ? views.key(name) : views.keys();
  },
  models: async (_, params) => (await import("./views/models.js")).models(params),
  audit: async (_, params) => (await import("./views/audit.js")).audit(params),
  health: async () => (await import("./views/health.js")).health(),
};
/** The navigation entry of each view that has no entry of its own. */
const PARENTS = /** @type {Record<string, string>} */ ({ session: "sessions", call: "sessions", audit: "health" });
const STATES = {
  connecting: ["connecting", "Connecting to the gateway."],
  live: ["live", "Calls are shown when they are settled."],
  polling: ["every 3 s", "The event stream is not available: the newest calls are loaded every 3 seconds."],
  offline: ["offline", "The gateway does not respond. This page tries again automatically."],
  locked: ["locked", "A key is needed."],
};

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
/** @type {{place: string, view: View} | null} */
let shown = null;
let turn = 0;

/** @param {boolean} isFirst */
async function show(isFirst) {
  const { view, id, params } = here();
  const place = `${view}/${id}`;
  if (shown?.place === place && shown.view.update) {
    shown.view.update(params);
    return;
  }
  const mine = ++turn;
  drop();
  mark(view);
  fill(main, loading());
  let made;
  try {
    made = await (Object.hasOwn(VIEWS, view) ? VIEWS[view] : unknown)(id, params);
  } catch (error) {
    made = failed(error);
  }
  if (mine !== turn) {
    made.close?.();
    return;
  }
  shown = { place, view: made };
  document.title = `${made.title} · Gateway`;
  fill(main, made.element);
  scrollTo(0, 0);
  if (!isFirst) main.focus({ preventScroll: true });
}

function drop() {
  shown?.view.close?.();
  shown = null;
}

/** @param {string} view */
function mark(view) {
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.getAttribute("data-view") === (PARENTS[view] ?? view);
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** @returns {Promise<View>} */
async function unknown() {
  const text = ["This view does not exist. ", h("a", { href: "#/" }, "Go to the live view")];
  return { title: "Not found", element: notice("Not found", text) };
}

/**
 * @param {unknown} error
 * @returns {View}
 */
function failed(error) {
  const again = h("button", { type: "button", onclick: () => show(false) }, "Try again");
  const message = error instanceof Error ? error.message : String(error);
  const other = error instanceof ApiError && error.status === 403 ? keyButton() : null;
  const title = error instanceof ApiError && error.status === 404 ? "Not found" : "The data could not be loaded";
  return { title, element: notice(title, message, other, " ", again) };
}

function keyButton() {
  const enter = async () => {
    if (!(await enterKey(""))) return;
    drop();
    show(false);
  };
  return h("button", { type: "button", class: "primary", onclick: enter }, "Enter a key");
}

/** Show a notice when a key is needed and the user was not asked, or cancelled. */
function locks() {
  const text = h("span", {});
  const bar = h("p", { class: "locked problem", role: "alert", hidden: true }, text, " ", keyButton());
  main.before(bar);
  document.addEventListener("gateway:locked", () => {
    bar.hidden = false;
    fill(text, hasKey() ? "The key is not known (any more)." : "A key is needed to show more.");
  });
  document.addEventListener("gateway:key", () => (bar.hidden = true));
}

function showFeed() {
  const element = /** @type {HTMLElement} */ (document.getElementById("feed"));
  const [text, title] = STATES[feed.state];
  element.dataset.state = feed.state;
  element.title = title;
  fill(element, text);
}

/** Connect the selection of colours; theme.js applies it. */
function themes() {
  const select = /** @type {HTMLSelectElement} */ (document.getElementById("theme"));
  select.value = document.documentElement.dataset.chosen ?? "system";
  select.addEventListener("change", () => {
    localStorage.setItem("gateway.theme", select.value);
    document.dispatchEvent(new Event("gateway:choose"));
  });
}

function keys() {
  const button = /** @type {HTMLElement} */ (document.getElementById("key"));
  const showIt = () => (button.hidden = !hasKey());
  button.addEventListener("click", () => {
    forgetKey();
    drop();
    show(false);
  });
  document.addEventListener("gateway:key", showIt);
  showIt();
}

askWith(askKey);
themes();
keys();
locks();
keepTimes();
feed.addEventListener("state", showFeed);
showFeed();
addEventListener("hashchange", () => show(false));
show(true);
feed.start();
