/**
 * The health view: the store, the providers and the running calls, from the view of one worker.
 * @module
 */
import { ApiError, api } from "../api.js";
import { facts, fill, h, renew, tile } from "../dom.js";
import { ago, clock, number, span } from "../format.js";
import { to } from "../router.js";
import { plain } from "../table.js";

/** @typedef {import("../types.js").Health} Health */

const RENEW_MS = 5000;
const STATES = /** @type {Record<string, [string, string, string]>} */ ({
  ok: ["good", "ok", "Its last call succeeded."],
  not_called: ["", "not called yet", "This worker has not sent a call to it yet."],
  no_key: ["", "no key", "No key is configured for it, and no call with a caller's own key was sent to it yet."],
  failing: ["warn", "failing", "Its last calls failed. Calls are still sent to it."],
  left_alone: [
    "bad",
    "circuit open",
    "It failed too often in a row. Calls are refused at once, or sent to a fallback (breaker).",
  ],
});

/** @returns {Promise<import("../types.js").View>} */
export async function health() {
  const place = h("div", { class: "stack" });
  const seen = h("span", { class: "muted", role: "status" });
  const draw = (/** @type {Health} */ now) => renew(place, content(now));
  draw(await api("api/health"));
  const again = async () => {
    if (document.hidden) return;
    try {
      draw(await api("api/health", { quiet: true }));
      fill(seen);
    } catch (error) {
      fill(seen, error instanceof Error ? error.message : String(error));
      if (error instanceof ApiError && error.status === 401) clearInterval(timer); // entering a key loads the view again
    }
  };
  const timer = setInterval(again, RENEW_MS);
  const element = h(
    "div",
    { class: "view" }, 
    h("div", { class: "title" }, h("h1", {}, "Health"), seen, h("a", { href: to("audit") }, "Audit log")),
    place,
  );
  return { title: "Health", element, close: () => clearInterval(timer) };
}

/** @param {Health} health */
function content(health) {
  const { version, worker, store, providers, default_provider: first, status, unrecorded_refusals: refused } = health;
  const isWell = status === "ready";
  const others = worker.workers > 1 ? `one of ${number(worker.workers)}; each reports only about itself` : null;
  return [
    h(
      "dl",
      { class: "tiles" },
      tile("Gateway", h("span", { class: `badge ${isWell ? "good" : "bad"}` }, status), `version ${version}`),
      tile("Worker", String(worker.pid), others),
      tile("Uptime", span((Date.now() - Date.parse(worker.started_at)) / 1000), ["since ", clock(worker.started_at)]),
      tile("Running calls", number(worker.calls)),
      tile("Holds", number(worker.holds), "budget of running calls"),
      tile("Waiting", number(store.waiting), "calls to be stored"),
    ),
    h("h2", {}, "Store"),
    store.problem ? h("p", { class: "problem", role: "alert" }, store.problem, " ", advice(store)) : null,
    facts([
      ["URL", h("span", { class: "mono" }, store.url)],
      [
        "State",
        h(
          "span",
          { class: `badge ${store.reachable && !store.away ? "good" : "bad"}` },
          store.reachable ? (store.away ? "recovering" : "reachable") : "unavailable",
        ),
      ],
      [
        "While it is unavailable",
        store.on_failure === "open" ? "calls are accepted within the last known budgets" : "new calls are refused",
      ],
      ["Settled calls waiting", number(store.waiting)],
    ]),
    h("h2", {}, "Providers"),
    providers.length
      ? plain(
          "Providers",
          [["Provider"], ["State"], ["Failures", "num"], ["Next try in", "num"], ["Adapter", "wide"]],
          providers.map((one) => {
            const [kind, text, title] = STATES[one.state];
            const name = [
              h("span", { class: "mono" }, one.name),
              one.name === first ? h("span", { class: "badge" }, "default") : null,
            ];
            return [
              h("span", {}, name),
              h("span", { class: `badge ${kind}`, title }, text),
              number(one.failures),
              one.asked_in_s === null ? "–" : span(one.asked_in_s),
              one.adapter,
            ];
          }),
        )
      : h("p", { class: "notice" }, "No provider is configured. Add one under providers: in gateway.yaml."),
    ...identityProvider(health.identity_provider),
    ...refusals(refused),
  ];
}

/** @param {Health["identity_provider"]} provider */
function identityProvider(provider) {
  if (!provider) return [];
  const { issuer, problem } = provider;
  return [
    h("h2", {}, "Identity provider"),
    problem
      ? h("p", { class: "problem", role: "alert" }, "Its keys cannot be read: ", problem, ". Check auth.jwt.jwks_url.")
      : null,
    facts([
      ["Issuer", h("span", { class: "mono" }, issuer)],
      ["Keys", h("span", { class: `badge ${problem ? "bad" : "good"}` }, problem ? "unavailable" : "ok")],
    ]),
  ];
}

/** @param {import("../types.js").UnrecordedRefusal[]} refused */
function refusals(refused) {
  if (!refused.length) return [];
  return [
    h("h2", {}, "Refusals without a record"),
    plain(
      "Refusals without a record",
      [["Error"], ["Hash of the key"], ["Count", "num"], ["Last"], ["Message", "wide"]],
      refused.map((one) => [
        h("span", { class: "badge warn", title: String(one.status) }, one.code),
        one.credential === null ? "–" : h("span", { class: "mono" }, one.credential),
        number(one.count),
        ago(one.last_at),
        one.message,
      ]),
    ),
  ];
}

/** @param {Health["store"]} store */
function advice(store) {
  return store.on_failure === "open"
    ? "Until it is available again, the usage of calls is written to the journal."
    : "Until it is available again, new calls are refused, and the usage of running calls is written to the journal.";
}
