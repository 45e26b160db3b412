/**
 * Read and write the address: the part after # selects the view, so that each view has a link.
 * @module
 */

/**
 * @typedef {object} Place
 * @property {string} view the first part, such as `sessions`; `live` if empty
 * @property {string} id the rest of the path
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
 * Return the address of a view.
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
 * Change the address without a new history entry, for example while the user types.
 * @param {string} address
 */
export function replace(address) {
  history.replaceState(null, "", address);
}
