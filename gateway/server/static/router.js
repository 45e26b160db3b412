/**
 * Addresses: what stands behind the # says which view is shown, so that each can be linked to.
 * @module
 */

/**
 * @typedef {object} Place
 * @property {string} view the first part: `sessions`; `live` where there is none
 * @property {string} id what follows it
 * @property {URLSearchParams} params
 */

/** @returns {Place} */
export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [view, ...rest] = path.split("/");
  return { view: view || "live", id: rest.map(decoded).join("/"), params: new URLSearchParams(query) };
}

/** @param {string} part */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/**
 * The address of a place.
 * @param {string} view
 * @param {string} [id]
 * @param {Record<string, string | null | undefined>} [params] empty ones are left out
 */
export function to(view, id = "", params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) if (value) query.set(name, value);
  const parts = [view === "live" ? "" : view, ...(id ? id.split("/").map(encodeURIComponent) : [])];
  return `#/${parts.join("/")}${query.size ? `?${query}` : ""}`;
}

/**
 * Change the address without a new entry in the history, as for what is typed into a search.
 * @param {string} address
 */
export function replace(address) {
  history.replaceState(null, "", address);
}
