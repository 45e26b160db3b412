/**
 * Call the gateway's HTTP API. A key, if needed, is kept for this tab only and is sent in a header.
 * @module
 */

/** @typedef {import("./types.js").Call} Call */
/** @typedef {import("./types.js").Session} Session */
/** @typedef {RequestInit & {quiet?: boolean}} Options `quiet`: a background request; do not ask the user for a key */

const KEY = "gateway.key";
/** The folder that contains /ui. A proxy may add a path prefix. */
const ROOT = new URL("../../", import.meta.url);

/** An error of the API. */
export class ApiError extends Error {
  /**
   * @param {number} status 0: no response
   * @param {string} code
   * @param {string} message
   */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** @type {(reason: string) => Promise<string | null>} asks the user for the key; null: cancelled */
let ask = async () => null;
/** @type {Promise<string | null> | null} */
let asking = null;

/** @param {(reason: string) => Promise<string | null>} asker */
export function askWith(asker) {
  ask = asker;
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
  document.dispatchEvent(new Event("gateway:key"));
}

/**
 * Ask the user for a key. Requests that need one at the same time share one question.
 * @param {string} reason
 * @returns {Promise<boolean>} whether the user entered a key
 */
export async function enterKey(reason) {
  asking ??= ask(reason);
  const key = await asking;
  asking = null;
  if (key === null) return false;
  sessionStorage.setItem(KEY, key);
  document.dispatchEvent(new Event("gateway:key"));
  return true;
}

/**
 * Send a request with the key and return the response.
 * @param {string} path below the root, such as `api/sessions`
 * @param {RequestInit} [options]
 * @returns {Promise<Response>}
 */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("authorization", `Bearer ${key}`);
  try {
    return await fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, "offline", "The gateway does not respond. Check that it is running; this page tries again.");
  }
}

/**
 * @param {string} path
 * @param {Options} [options]
 * @returns {Promise<any>} the JSON of the response
 */
export async function api(path, options = {}) {
  for (;;) {
    const used = sessionStorage.getItem(KEY);
    const response = await request(path, options);
    if (response.ok) return response.json();
    const fault = await faultOf(response);
    if (response.status !== 401) throw fault;
    // Another request may have asked for a key in the meantime.
    const isNew = sessionStorage.getItem(KEY) !== used;
    // The message about a token says what is wrong with it, such as that it has expired.
    const known = used?.startsWith("eyJ") ? fault.message : "This key is not known. Enter another key.";
    const reason = used ? known : "";
    if (isNew || (!options.quiet && (await enterKey(reason)))) continue;
    document.dispatchEvent(new Event("gateway:locked"));
    throw fault;
  }
}

/**
 * @param {"PATCH" | "POST" | "DELETE"} method
 * @param {string} path
 * @param {unknown} [body]
 */
export function send(method, path, body) {
  const content =
    body === undefined ? {} : { body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  return api(path, { method, ...content });
}

/**
 * @param {Response} response
 * @returns {Promise<ApiError>}
 */
async function faultOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.code, error.message);
  } catch {
    return new ApiError(response.status, "unknown", `The gateway returned ${response.status} without a reason.`);
  }
}

/**
 * Return the path of a session below the root. Its id may contain one slash, after the name of its client key.
 * @param {string} id
 */
export function sessionPath(id) {
  return `api/sessions/${id.split("/").map(encodeURIComponent).join("/")}`;
}
