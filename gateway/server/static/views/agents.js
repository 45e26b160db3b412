/**
 * The agents of a session: what the main agent and each subagent used.
 * @module
 */
import { h, meter } from "../dom.js";
import { ago, number, percent, usd } from "../format.js";
import { plain } from "../table.js";

/** @typedef {import("../types.js").Agent} Agent */

/** names of tools that a row shows */
const TOOLS = 3;
const COLUMNS = /** @type {[string, string?][]} */ ([
  ["Agent"],
  ["Type", "type"],
  ["Calls", "num wide"],
  ["Tokens", "num"],
  ["Cost", "num"],
  ["With children", "num wide"],
  ["Budget", "share wide"],
  ["Step", "wide"],
  ["Tools", "wide"],
  ["Last call", "num wide"],
]);

/**
 * @param {Agent[]} agents the main agent first
 * @param {(agent: string) => string} address of the session with only the calls of an agent
 */
export function agentsOf(agents, address) {
  if (!agents.length) return null;
  const known = new Map(agents.map((agent) => [agent.id, agent]));
  const rows = agents.map((agent) => [
    h(
      "a",
      { class: "mono", href: address(agent.id), title: `${agent.id}: show only its calls` },
      indent(agent, known),
      agent.id,
    ),
    agent.type,
    number(agent.calls),
    number(agent.cumulative_token_usage.total_tokens),
    usd(agent.cost_usd),
    agent.with_children && number(agent.with_children.cumulative_token_usage.total_tokens),
    budget(agent),
    agent.active_step,
    tools(agent),
    agent.last_call_at && ago(agent.last_call_at),
  ]);
  // Columns without any value are left out.
  const isUsed = COLUMNS.map((_, index) => rows.some((row) => row[index] !== null && row[index] !== ""));
  return h(
    "section",
    { class: "stack" },
    h("h2", {}, "Agents"),
    h("p", { class: "muted" }, "Tokens are of an agent's own calls; together they are those of the session."),
    plain(
      "Agents of this session",
      COLUMNS.filter((_, index) => isUsed[index]),
      rows.map((row) => row.filter((_, index) => isUsed[index])),
    ),
  );
}

/**
 * Return an indent that shows how far an agent is below the main agent.
 * @param {Agent} agent
 * @param {Map<string, Agent>} known
 */
function indent(agent, known) {
  let depth = agent.id === "main" ? 0 : 1;
  const seen = new Set([agent.id]);
  for (let above = agent.parent; above && known.has(above) && above !== "main" && !seen.has(above); depth++) {
    seen.add(above);
    above = known.get(above)?.parent ?? null;
  }
  return "\u2003".repeat(depth);
}

/** @param {Agent} agent */
function budget({ id, budget: found }) {
  if (!found) return null;
  return meter(found.used_fraction, `${id} has used ${percent(found.used_fraction)} of its budget`);
}

/** @param {Agent} agent */
function tools({ tools: counts }) {
  const names = Object.entries(counts);
  const shown = names.slice(0, TOOLS).map(([name, calls]) => (calls > 1 ? `${name} ×${number(calls)}` : name));
  return [...shown, ...(names.length > TOOLS ? [`${number(names.length - TOOLS)} more`] : [])].join(", ");
}
