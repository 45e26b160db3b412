/**
 * The gateway's HTTP API. The key, where one is needed, is kept for this tab only and goes in a header.
 * @module
 */

/** @typedef {import("./types.js").Call} Call */
/** @typedef {import("./types.js").Session} Session */
/** @typedef {RequestInit & {quiet?: boolean}} Options `quiet`: nobody waits for it, so no key is asked for */

const KEY = "gateway.key";
/** The folder that /ui stands in, so that a proxy may put another in front. */
const ROOT = new URL("../../", import.meta.url);

/** What the API refused, or could not do. */
export class ApiError extends Error {
  /**
   * @param {number} status 0: nothing answered
   * @param {string} code
   * @param {string} message
   */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** @type {(reason: string) => Promise<string | null>} asks a person for the key; null: they have none */
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
 * Ask for a key, once however many requests need it.
 * @param {string} reason
 * @returns {Promise<boolean>} whether there is a new one
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
 * A request as it is, with the key.
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
    throw new ApiError(0, "offline", "The gateway does not answer. Check that it is running; this page tries again.");
  }
}

/**
 * @param {string} path
 * @param {Options} [options]
 * @returns {Promise<any>} the JSON of the answer
 */
export async function api(path, options = {}) {
  for (;;) {
    const used = sessionStorage.getItem(KEY);
    const answer = await request(path, options);
    if (answer.ok) return answer.json();
    const fault = await faultOf(answer);
    if (answer.status !== 401) throw fault;
    // Another request may have asked meanwhile.
    const isNew = sessionStorage.getItem(KEY) !== used;
    const reason = used ? "This key is not known. Enter another one." : "";
    if (isNew || (!options.quiet && (await enterKey(reason)))) continue;
    document.dispatchEvent(new Event("gateway:locked"));
    throw fault;
  }
}

/**
 * @param {"PATCH" | "POST"} method
 * @param {string} path
 * @param {unknown} [body]
 */
export function send(method, path, body) {
  const content =
    body === undefined ? {} : { body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  return api(path, { method, ...content });
}

/**
 * @param {Response} answer
 * @returns {Promise<ApiError>}
 */
async function faultOf(answer) {
  try {
    const { error } = await answer.json();
    return new ApiError(answer.status, error.code, error.message);
  } catch {
    return new ApiError(answer.status, "unknown", `The gateway answered ${answer.status} without saying why.`);
  }
}

/**
 * The address of a session, below the root. Its id may hold one slash, behind the name of its client key.
 * @param {string} id
 */
export function sessionPath(id) {
  return `api/sessions/${id.split("/").map(encodeURIComponent).join("/")}`;
}
