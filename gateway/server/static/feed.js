/**
 * Receive settled calls from the gateway's event stream, or load them every few seconds if the stream is not available.
 * @module
 */
import { ApiError, api, request } from "./api.js";

/** @typedef {import("./types.js").Call} Call */
/** @typedef {"connecting" | "live" | "polling" | "offline" | "locked"} State */

/** number of calls that are kept; older calls are on the pages of their sessions */
export const KEPT = 500;
const POLL_MS = 3000;
const POLLED = 100;
/** time until a refused stream is tried again */
const STREAM_AGAIN_MS = 30_000;
const LONGEST_WAIT_MS = 15_000;

export class Feed extends EventTarget {
  constructor() {
    super();
    /** @type {State} */
    this.state = "connecting";
    /** newest first @type {Call[]} */
    this.calls = [];
    /** outcomes of calls by id; a call that was considered lost may come again @type {Map<string, string>} */
    this.known = new Map();
    this.running = new AbortController();
    document.addEventListener("gateway:key", () => this.restart());
  }

  /** Receive calls until the page is closed. */
  async start() {
    const { signal } = this.running;
    let wait = 500;
    let isAgain = false;
    while (!signal.aborted) {
      try {
        // Ask for a key only at the start: then the user has just opened the page, or entered another key.
        await this.poll(signal, { quiet: isAgain });
        isAgain = true;
        wait = 500;
        await this.stream(signal);
      } catch (error) {
        if (signal.aborted) return;
        const isLocked = error instanceof ApiError && error.status === 401;
        this.become(isLocked ? "locked" : "offline");
        if (isLocked) return; // entering a key restarts the feed
        await pause(wait, signal);
        wait = Math.min(LONGEST_WAIT_MS, wait * 2);
      }
    }
  }

  /** Forget all calls and start again: another key shows other calls. */
  restart() {
    this.running.abort();
    this.running = new AbortController();
    this.calls = [];
    this.known.clear();
    this.become("connecting");
    this.start();
  }

  /**
   * Read the stream until it ends.
   * @param {AbortSignal} signal
   */
  async stream(signal) {
    const response = await request("api/events", { signal, headers: { accept: "text/event-stream" } });
    if (!response.ok || !response.body || !response.headers.get("content-type")?.startsWith("text/event-stream")) {
      await response.body?.cancel();
      await this.pollFor(response.status === 404 ? Infinity : STREAM_AGAIN_MS, signal);
      return;
    }
    this.become("live");
    // Load calls that were settled between the first request and the start of the stream.
    await this.poll(signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader((name, data) => this.take(name, data));
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      events.feed(value);
    }
    this.become("connecting");
    await pause(500, signal);
  }

  /**
   * @param {number} duration milliseconds
   * @param {AbortSignal} signal
   */
  async pollFor(duration, signal) {
    this.become("polling");
    const end = Date.now() + duration;
    while (Date.now() < end && !signal.aborted) {
      await pause(document.hidden ? POLL_MS * 5 : POLL_MS, signal);
      await this.poll(signal);
    }
  }

  /**
   * Load the newest calls. If they do not reach back to a known call, load as many as are kept.
   * @param {AbortSignal} signal
   * @param {import("./api.js").Options} [options]
   */
  async poll(signal, options = { quiet: true }) {
    const newest = async (/** @type {number} */ limit) =>
      (await api(`api/calls?limit=${limit}`, { ...options, signal })).calls;
    const few = await newest(this.calls.length ? POLLED : KEPT);
    const isGap = this.calls.length > 0 && !few.some((/** @type {Call} */ call) => this.known.has(call.call_id));
    this.add(isGap ? await newest(KEPT) : few, isGap);
  }

  /**
   * @param {string} name
   * @param {string} data
   */
  take(name, data) {
    if (name === "call") this.add([JSON.parse(data)]);
    if (name === "missed") this.poll(this.running.signal).catch(() => {}); // the stream reports its own end
  }

  /**
   * @param {Call[]} calls newest first
   * @param {boolean} [isGap] there may be unknown calls between these and the known ones
   */
  add(calls, isGap = false) {
    const fresh = calls.filter((call) => this.known.get(call.call_id) !== call.outcome);
    if (fresh.length === 0) return;
    for (const call of fresh) this.known.set(call.call_id, call.outcome);
    this.calls = merged(this.calls, fresh).slice(0, KEPT);
    if (this.known.size > 4 * KEPT) this.known = new Map(this.calls.map((call) => [call.call_id, call.outcome]));
    this.dispatchEvent(new CustomEvent("calls", { detail: { fresh, isGap } }));
  }

  /** @param {State} state */
  become(state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new Event("state"));
  }

  /**
   * Call a listener for new calls.
   * @param {(calls: Call[], isGap: boolean) => void} listener receives the new calls, newest first, and whether some may
   *   be missing
   * @returns {() => void} removes the listener
   */
  onCalls(listener) {
    const heard = (/** @type {Event} */ event) => {
      const { fresh, isGap } = /** @type {CustomEvent<{fresh: Call[], isGap: boolean}>} */ (event).detail;
      listener(fresh, isGap);
    };
    this.addEventListener("calls", heard);
    return () => this.removeEventListener("calls", heard);
  }
}

/**
 * Merge new calls into the known ones, newest first. A later record of a call replaces the earlier one.
 * @param {Call[]} calls
 * @param {Call[]} fresh
 */
export function merged(calls, fresh) {
  const ids = new Set(fresh.map((call) => call.call_id));
  const others = calls.filter((call) => !ids.has(call.call_id));
  return [...fresh, ...others].sort((a, b) => (a.call_id < b.call_id ? 1 : -1));
}

/** Split a stream into server-sent events. */
export class EventReader {
  /** @param {(name: string, data: string) => void} take */
  constructor(take) {
    this.take = take;
    this.rest = "";
  }

  /** @param {string} text */
  feed(text) {
    const blocks = (this.rest + text).replaceAll("\r\n", "\n").split("\n\n");
    this.rest = blocks.pop() ?? "";
    for (const block of blocks) {
      let name = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      }
      if (data.length) this.take(name, data.join("\n"));
    }
  }
}

/**
 * @param {number} ms
 * @param {AbortSignal} signal ends the wait
 * @returns {Promise<void>}
 */
function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

/** The feed of this page. */
export const feed = new Feed();
