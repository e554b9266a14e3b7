/* The map: one cell a page on a canvas, drawn pixel by pixel so that 100,000 pages cost a few milliseconds. */

export const KINDS = ["free", "cached", "used", "shared2", "shared3", "shared5"];
const FADE = 350; // milliseconds from one colour to the next
const FRAME = 30; // milliseconds between two frames of a fade
const MOST_FADING = 20000; // cells; beyond that all change at once
const LARGEST = 20; // CSS pixels of a cell with its gap

/** Index into KINDS for a state (0 free, 1 cached, 2 in use) and a count of holders. */
export function kindOf(state, refs) {
  if (state !== 2) return state;
  return refs < 2 ? 2 : refs === 2 ? 3 : refs < 5 ? 4 : 5;
}

/** Number of pages of each kind. */
export function countKinds(states, refs) {
  const counts = new Array(KINDS.length).fill(0);
  for (let i = 0; i < states.length; i++) counts[kindOf(states[i], refs[i])]++;
  return counts;
}

/**
 * Largest whole cell, in device pixels, with which n cells fill at most width x height, and what follows from it.
 * Where even single pixels do not fit, the height gives way.
 */
export function layout(n, width, height, largest) {
  let pitch = Math.max(1, Math.floor(largest));
  while (pitch > 1 && Math.ceil(n / Math.max(1, Math.floor(width / pitch))) * pitch > height) pitch--;
  const most = Math.max(1, Math.floor(width / pitch));
  const even = [64, 32, 16, 8].map((step) => most - (most % step)); // rows of a round number of pages, where they fit
  const columns = even.find((c) => c > most * 0.9 && Math.ceil(n / c) * pitch <= height) ?? most;
  const gap = pitch >= 14 ? 2 : pitch >= 3 ? 1 : 0;
  return { pitch, columns, gap, rows: Math.max(1, Math.ceil(n / columns)) };
}

/** onPoint(page or null): the pointer or a key chose a page. onPin(page): it was clicked or Enter was pressed. */
export class PageMap {
  #canvas;
  #context;
  #frame;
  #states = new Uint8Array(0);
  #refs = new Uint8Array(0);
  #n = 0; // cells shown
  #cell = { pitch: 1, columns: 1, gap: 0, rows: 1 };
  #kinds = new Uint8Array(0); // of each cell shown
  #colours = new Uint32Array(0); // as drawn now
  #fading = new Map(); // cell -> [colour before, begin]
  #image = null;
  #pixels = null;
  #palette = [];
  #marked = null; // Set of pages that stay bright while the others pale
  #cursor = -1;
  #pending = 0;
  #painted = 0;
  #crop = false;
  #longest = 0; // cells that were ever in use, for cropping

  constructor(canvas, { onPoint, onPin }) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d", { alpha: false });
    this.#frame = canvas.parentElement;
    this.onPoint = onPoint;
    this.onPin = onPin;
    this.#readPalette();
    new ResizeObserver(() => this.#relayout()).observe(this.#frame);
    window.addEventListener("resize", () => this.#relayout());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#readPalette();
      this.#relayout();
    });
    this.#calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.#wire();
  }

  #calm;

  /** Show these pages: bytes of one length each. */
  update(states, refs) {
    this.#states = states;
    this.#refs = refs;
    let last = states.length;
    while (last > 0 && states[last - 1] === 0) last--;
    this.#longest = Math.min(Math.max(this.#longest, last), states.length);
    if (this.#shown() !== this.#n) return this.#relayout();
    const changed = [];
    for (let i = 0; i < this.#n; i++) {
      const kind = kindOf(states[i], refs[i]);
      if (kind !== this.#kinds[i]) {
        this.#kinds[i] = kind;
        changed.push(i);
      }
    }
    if (changed.length) this.#recolour(changed);
  }

  /** Leave out the free pages behind the last one that was in use, so that the others have room. */
  set crop(wanted) {
    this.#crop = wanted;
    this.#relayout();
  }

  /** Pages to keep bright, null for all. */
  mark(pages) {
    const before = this.#marked;
    this.#marked = pages;
    if (before === null && pages === null) return;
    if (!this.#pixels) return;
    this.#fading.clear();
    for (let i = 0; i < this.#n; i++) {
      const colour = this.#target(i);
      if (colour !== this.#colours[i]) this.#fill(i, colour);
    }
    this.#show();
  }

  /** Where cells are: pitch in device pixels from one to the next, gap of it between them, columns and rows. */
  get cell() {
    return this.#cell;
  }

  /** Number of cells on their way to another colour. */
  get fading() {
    return this.#fading.size;
  }

  #shown() {
    if (!this.#crop) return this.#states.length;
    const step = 256;
    return Math.min(this.#states.length, Math.max(step, Math.ceil(this.#longest / step) * step));
  }

  #readPalette() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => rgb(style.getPropertyValue(name));
    const paper = read("--panel");
    const full = KINDS.map((kind) => read(`--page-${kind}`));
    const free = full[0];
    const pale = full.map((colour, i) => (i ? mix(free, colour, 0.28) : mix(free, paper, 0.35)));
    this.#palette = { paper, full, pale, ink: style.getPropertyValue("--ink") };
  }

  #target(i) {
    const { full, pale } = this.#palette;
    return (this.#marked && !this.#marked.has(i) ? pale : full)[this.#kinds[i]];
  }

  #relayout() {
    const style = getComputedStyle(this.#frame);
    const inner = this.#frame.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    if (!(inner > 0)) return; // not on screen
    const scale = window.devicePixelRatio || 1;
    const n = this.#shown();
    this.#n = n;
    for (const part of [0.37, 0.62]) { // a large pool may be taller, for the sake of cells that can be seen
      const height = Math.max(150, window.innerHeight * part);
      this.#cell = layout(n, Math.floor(inner * scale), Math.floor(height * scale), LARGEST * scale);
      if (this.#cell.pitch >= 4 * scale) break;
    }
    const { pitch, columns, gap, rows } = this.#cell;
    const width = Math.min(columns, Math.max(1, n)) * pitch - gap;
    const tall = rows * pitch - gap;
    this.#canvas.width = width;
    this.#canvas.height = tall;
    this.#canvas.style.width = `${width / scale}px`;
    this.#canvas.style.height = `${tall / scale}px`;
    this.#image = this.#context.createImageData(width, tall);
    this.#pixels = new Uint32Array(this.#image.data.buffer);
    this.#pixels.fill(this.#palette.paper);
    this.#kinds = new Uint8Array(n);
    this.#colours = new Uint32Array(n);
    this.#fading.clear();
    for (let i = 0; i < n; i++) {
      this.#kinds[i] = kindOf(this.#states[i], this.#refs[i]);
      this.#fill(i, this.#target(i));
    }
    if (this.#cursor >= n) this.#cursor = n - 1;
    this.#show();
  }

  #recolour(cells) {
    if (!this.#pixels) return;
    if (this.#calm.matches || cells.length > MOST_FADING) {
      for (const i of cells) {
        this.#fading.delete(i);
        this.#fill(i, this.#target(i));
      }
      this.#show();
    } else {
      const now = performance.now();
      for (const i of cells) this.#fading.set(i, [this.#colours[i], now]);
      this.#schedule();
    }
  }

  #schedule() {
    if (!this.#pending) this.#pending = requestAnimationFrame((now) => this.#step(now));
  }

  #step(now) {
    this.#pending = 0;
    if (now - this.#painted >= FRAME) {
      this.#painted = now;
      for (const [i, [before, begin]] of this.#fading) {
        const part = Math.min(1, Math.max(0, (now - begin) / FADE));
        this.#fill(i, mix(before, this.#target(i), part * (2 - part)));
        if (part === 1) this.#fading.delete(i);
      }
      this.#show();
    }
    if (this.#fading.size) this.#schedule();
  }

  #fill(i, colour) {
    this.#colours[i] = colour;
    const { pitch, columns, gap } = this.#cell;
    const size = pitch - gap;
    const width = this.#image.width;
    const round = size >= 9 ? 2 : size >= 5 ? 1 : 0; // corners left out
    const at = Math.floor(i / columns) * pitch * width + (i % columns) * pitch;
    for (let y = 0; y < size; y++) {
      const cut = Math.max(0, round - Math.min(y, size - 1 - y));
      this.#pixels.fill(colour, at + y * width + cut, at + y * width + size - cut);
    }
  }

  #show() {
    if (!this.#image) return;
    this.#context.putImageData(this.#image, 0, 0);
    if (this.#cursor >= 0 && document.activeElement === this.#canvas) {
      const { pitch, columns, gap } = this.#cell;
      const size = Math.max(pitch - gap, 3);
      const x = (this.#cursor % columns) * pitch;
      const y = Math.floor(this.#cursor / columns) * pitch;
      this.#context.strokeStyle = this.#palette.ink;
      this.#context.lineWidth = Math.max(2, Math.round(window.devicePixelRatio || 1));
      this.#context.strokeRect(x - 1, y - 1, size + 2, size + 2);
    }
  }

  #pageAt(event) {
    const box = this.#canvas.getBoundingClientRect();
    const { pitch, columns } = this.#cell;
    const column = Math.floor(((event.clientX - box.left) * this.#canvas.width) / box.width / pitch);
    const row = Math.floor(((event.clientY - box.top) * this.#canvas.height) / box.height / pitch);
    const page = row * columns + column;
    return column >= 0 && column < columns && row >= 0 && page < this.#n ? page : null;
  }

  #wire() {
    const canvas = this.#canvas;
    canvas.addEventListener("pointermove", (event) => this.onPoint(this.#pageAt(event)));
    canvas.addEventListener("pointerleave", () => this.onPoint(null));
    canvas.addEventListener("click", (event) => {
      const page = this.#pageAt(event);
      if (page !== null) this.#cursor = page;
      this.onPin(page);
      this.#show();
    });
    canvas.addEventListener("focus", () => {
      if (this.#cursor < 0 && this.#n) this.#cursor = 0;
      if (canvas.matches(":focus-visible")) this.onPoint(this.#cursor);
      this.#show();
    });
    canvas.addEventListener("blur", () => {
      this.onPoint(null);
      this.#show();
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const { columns } = this.#cell;
    const moves = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -10 * columns, PageDown: 10 * columns,
      Home: -this.#n, End: this.#n,
    };
    if (event.key === "Enter" || event.key === " ") {
      this.onPin(this.#cursor);
    } else if (event.key === "Escape") {
      this.onPin(null);
    } else if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
      const to = this.#cursor + moves[event.key];
      const whole = event.key === "Home" || event.key === "End";
      if (whole || (to >= 0 && to < this.#n)) this.#cursor = Math.min(Math.max(to, 0), this.#n - 1);
      this.onPoint(this.#cursor);
      this.#show();
    } else {
      return;
    }
    event.preventDefault();
  }
}

/* Colours are pixels of an ImageData seen as little-endian words: alpha, blue, green, red. */

function rgb(text) {
  const value = parseInt(text.trim().slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

function mix(from, to, part) {
  let out = 0xff000000;
  for (const shift of [0, 8, 16]) {
    const a = (from >>> shift) & 0xff;
    out |= Math.round(a + (((to >>> shift) & 0xff) - a) * part) << shift;
  }
  return out >>> 0;
}
