/* The panel beside the chat: asks the server for the arena's map, and shows it as cells, requests and charts. */

import { ApiError, request, stored } from "./api.js";
import { drawChart, History, niceCeiling } from "./charts.js";
import { countKinds, KINDS, PageMap } from "./map.js";

const BUSY = 500; // milliseconds between two questions while requests run
const IDLE = 1500;
const OFFLINE = 4000;
const MOST_LISTED = 48; // requests
const CROP = "pagedkv-crop";
const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");

/** onKeyWanted(): the server answered 401. */
export class ArenaPanel {
  #map;
  #history = new History();
  #arena = null; // the last answer, its bytes decoded
  #pages = new Map(); // request id -> {pages: Set, tokens, outputs}
  #chips = new Map(); // request id -> list item
  #pointed = null; // page under pointer or cursor
  #previewed = null; // request whose chip is pointed at or focused
  #pinned = new Set(); // requests that stay marked
  #mine = null;
  #timer = 0;
  #asking = null;

  constructor({ onKeyWanted }) {
    this.onKeyWanted = onKeyWanted;
    this.#map = new PageMap($("map"), {
      onPoint: (page) => {
        this.#pointed = page;
        this.#mark();
      },
      onPin: (page) => this.#pin(page === null ? [] : this.#holders(page).map(([id]) => id)),
    });
    $("crop").checked = stored(() => localStorage.getItem(CROP)) === "yes";
    this.#map.crop = $("crop").checked;
    $("crop").addEventListener("change", () => {
      this.#map.crop = $("crop").checked;
      stored(() => localStorage.setItem(CROP, $("crop").checked ? "yes" : "no"));
    });
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#pause() : this.start()));
    window.addEventListener("resize", () => this.#drawCharts());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#drawCharts());
  }

  /** Begin or go on asking. */
  start() {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#asking) this.#ask();
  }

  /** Id of the answer being streamed into this page, null when there is none. */
  set mine(id) {
    this.#mine = id;
    if (id !== null) this.start();
  }

  /** The panel came on screen again. */
  shown() {
    this.#drawCharts();
  }

  #pause() {
    clearTimeout(this.#timer);
    this.#asking?.abort();
    this.#history.pause();
    this.#say("paused", "paused");
  }

  async #ask() {
    const controller = (this.#asking = new AbortController());
    let wait = OFFLINE;
    try {
      const response = await request("debug/arena", { signal: controller.signal });
      const arena = await response.json();
      this.#show(arena);
      this.#say("live", "live");
      wait = arena.stats.running + arena.stats.waiting ? BUSY : IDLE;
    } catch (error) {
      if (controller.signal.aborted) return;
      this.#history.pause();
      const refused = error instanceof ApiError;
      this.#say("offline", refused && error.status === 401 ? "key needed" : refused ? `error ${error.status}` : "offline");
      if (refused && error.status === 401) {
        this.onKeyWanted();
        return;
      }
    } finally {
      this.#asking = null;
    }
    if (!document.hidden) this.#timer = setTimeout(() => this.#ask(), wait);
  }

  #say(state, text) {
    const status = $("connection");
    if (status.dataset.state !== state || status.textContent !== text) {
      status.dataset.state = state;
      status.textContent = text;
    }
  }

  #show(arena) {
    arena.states = Uint8Array.from(atob(arena.states), (c) => c.charCodeAt(0));
    arena.refs = Uint8Array.from(atob(arena.refs), (c) => c.charCodeAt(0));
    this.#arena = arena;
    this.#pages = new Map();
    for (const { request_id: id, index, pages, tokens } of arena.owners) {
      const entry = this.#pages.get(id) ?? { pages: new Set(), tokens: 0, outputs: [] };
      for (const page of pages) entry.pages.add(page);
      entry.tokens += tokens;
      entry.outputs.push(index);
      this.#pages.set(id, entry);
    }
    for (const id of this.#pinned) if (!this.#pages.has(id)) this.#pinned.delete(id);
    this.#map.update(arena.states, arena.refs);
    this.#history.add(arena.time, arena.stats);
    $("pages").dataset.step = arena.stats.steps; // all that is shown is of this moment
    this.#showCounts();
    this.#showRequests();
    this.#mark();
    this.#drawCharts();
  }

  #showCounts() {
    const { states, refs, stats, pages_total: total, page_tokens: size } = this.#arena;
    const counts = countKinds(states, refs);
    KINDS.forEach((kind, i) => {
      setText(document.querySelector(`#legend [data-kind="${kind}"] b`), whole.format(counts[i]));
    });
    setText($("pool"), `${whole.format(stats.pages_in_use)} of ${whole.format(total)} in use`);
    $("pool").title = `${size} tokens a page`;
    for (const [name, n] of [["used", stats.pages_in_use], ["cached", stats.pages_cached], ["free", stats.pages_free]]) {
      document.querySelector(`#occupancy .${name}`).style.flexGrow = n;
    }
    $("map").setAttribute(
      "aria-label",
      `Map of ${whole.format(total)} pages: ${whole.format(stats.pages_in_use)} in use, ` +
        `${whole.format(stats.pages_cached)} cached, ${whole.format(stats.pages_free)} free`,
    );
  }

  /** [id, entry] of each request that holds a page. */
  #holders(page) {
    return [...this.#pages].filter(([, entry]) => entry.pages.has(page));
  }

  /** A request's id, short enough for a line. */
  #named(id) {
    if (id === this.#mine) return "your answer";
    const made = id.match(/^(chat)?cmpl-([0-9a-f]{8})[0-9a-f]{24}(-[0-9]+)?$/); // by this server
    if (made) return `${made[1] ?? "text"} ${made[2]}${made[3] ?? ""}`;
    return id.length > 22 ? `${id.slice(0, 12)}…${id.slice(-6)}` : id;
  }

  #pin(ids) {
    const same = ids.length === this.#pinned.size && ids.every((id) => this.#pinned.has(id));
    this.#pinned = new Set(same ? [] : ids);
    this.#showPins();
    this.#mark();
  }

  #showPins() {
    for (const [id, { button }] of this.#chips) button?.setAttribute("aria-pressed", String(this.#pinned.has(id)));
  }

  /** Brighten the pages of what is pointed at, previewed or pinned, and say what that is. */
  #mark() {
    if (!this.#arena) return;
    let ids = [...this.#pinned];
    if (this.#previewed !== null) ids = [this.#previewed];
    if (this.#pointed !== null) {
      const holders = this.#holders(this.#pointed).map(([id]) => id);
      if (holders.length) ids = holders;
    }
    const entries = ids.map((id) => this.#pages.get(id)).filter(Boolean);
    this.#map.mark(entries.length ? entries.map((entry) => entry.pages).reduce(union) : null);
    for (const [id, { item }] of this.#chips) item.classList.toggle("marked", ids.includes(id));
    setText($("readout"), this.#readout(ids, entries));
  }

  #readout(ids, entries) {
    if (this.#pointed !== null && this.#pointed < this.#arena.states.length) return this.#describe(this.#pointed);
    if (entries.length) return entries.map((entry, i) => `${this.#named(ids[i])}: ${sized(entry)}`).join(". ") + ".";
    return "Point at a page to see whose it is.";
  }

  #describe(page) {
    const { states, refs } = this.#arena;
    const n = refs[page];
    const state = [
      "free",
      "cached: nobody holds it, a prompt that begins alike will find it",
      n > 1 ? `in use, shared by ${n === 255 ? "255 or more" : n} outputs` : "in use",
    ][states[page]];
    const holders = this.#holders(page);
    const names = holders.slice(0, 4).map(([id, entry]) => `${this.#named(id)} (${sized(entry)})`);
    if (holders.length > 4) names.push(`${holders.length - 4} more`);
    return `Page ${whole.format(page)}: ${state}.${names.length ? ` Held by ${names.join(", ")}.` : ""}`;
  }

  #showRequests() {
    const { stats, queue } = this.#arena;
    setText($("requests-count"), stats.running + stats.waiting ? `${stats.running} running, ${stats.waiting} waiting` : "");
    const wanted = new Map();
    for (const [id, entry] of this.#pages) wanted.set(id, entry);
    for (const { request_id: id } of queue) if (!wanted.has(id)) wanted.set(id, null);
    const listed = new Set([...wanted.keys()].slice(0, MOST_LISTED));
    const list = $("requests");
    for (const [id, chip] of this.#chips) {
      if (listed.has(id) && Boolean(chip.button) === Boolean(wanted.get(id))) continue;
      if (chip.item.contains(document.activeElement)) list.focus();
      if (this.#previewed === id) this.#previewed = null;
      chip.item.remove();
      this.#chips.delete(id);
    }
    for (const id of listed) {
      const entry = wanted.get(id);
      const chip = this.#chips.get(id) ?? this.#addChip(id, entry !== null);
      chip.item.classList.toggle("mine", id === this.#mine);
      setText(chip.button ?? chip.item, entry ? `${this.#named(id)} · ${sized(entry)}` : `${this.#named(id)} waits`);
    }
    list.querySelector(".more")?.remove();
    if (wanted.size > MOST_LISTED || !wanted.size) {
      const more = document.createElement("li");
      more.className = "more";
      more.textContent = wanted.size ? `and ${whole.format(wanted.size - MOST_LISTED)} more` : "Nobody is being served.";
      list.append(more);
    }
    this.#showPins();
  }

  #addChip(id, holds) {
    const item = document.createElement("li");
    item.title = id;
    let button = null;
    if (holds) {
      button = document.createElement("button");
      button.type = "button";
      const preview = (wanted) => () => {
        this.#previewed = wanted ? id : this.#previewed === id ? null : this.#previewed;
        this.#mark();
      };
      button.addEventListener("pointerenter", preview(true));
      button.addEventListener("pointerleave", preview(false));
      button.addEventListener("focus", preview(true));
      button.addEventListener("blur", preview(false));
      button.addEventListener("click", () => this.#pin([id]));
      item.append(button);
    } else {
      item.className = "waiting";
    }
    $("requests").append(item);
    const chip = { item, button };
    this.#chips.set(id, chip);
    return chip;
  }

  #drawCharts() {
    const history = this.#history;
    if (!history.samples.length) return;
    const tokens = history.tokens;
    const running = history.running;
    const waiting = history.waiting;
    const hits = history.hits;
    const preemptions = history.preemptions;
    const now = (points) => points.at(-1)?.value ?? null;
    const rate = (x) => (x >= 100 ? x.toFixed(0) : x.toFixed(1));
    chart("tokens", now(tokens), rate, [{ points: tokens, colour: "--page-used", fill: true }], peak(tokens));
    chart(
      "queue",
      now(running),
      (n) => `${n} + ${now(waiting)}`,
      [
        { points: running, colour: "--page-used", fill: true },
        { points: waiting, colour: "--waiting", fill: false },
      ],
      Math.max(peak(running), peak(waiting)),
    );
    chart("hits", now(hits), (x) => `${Math.round(100 * x)} %`, [{ points: hits, colour: "--page-shared2", fill: true }], 1);
    chart("preemptions", now(preemptions), String, [{ points: preemptions, colour: "--page-shared5", fill: true }], peak(preemptions));
  }
}

function chart(name, value, written, lines, most) {
  const figure = document.querySelector(`[data-chart="${name}"]`);
  const top = niceCeiling(most);
  setText(figure.querySelector("b"), value === null ? "–" : written(value));
  setText(figure.querySelector("span"), `scale to ${name === "hits" ? "100 %" : whole.format(top)}`);
  drawChart(figure.querySelector("canvas"), lines, top);
}

function peak(points) {
  return points.reduce((most, { value }) => Math.max(most, value ?? 0), 0);
}

function union(a, b) {
  return new Set([...a, ...b]);
}

function sized({ pages, tokens, outputs }) {
  const shown = `${whole.format(pages.size)} page${pages.size === 1 ? "" : "s"}, ${whole.format(tokens)} tokens`;
  return outputs.length > 1 ? `${shown} in ${outputs.length} outputs` : shown;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
