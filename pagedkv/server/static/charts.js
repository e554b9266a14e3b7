/* What the pool's counters say over the last minutes, and small line charts of it. */

export const SPAN = 300; // seconds shown, fewer at the beginning
const SHORTEST = 60;
const RATE = 3; // seconds over which tokens per second are counted
const MINUTE = 60;

/** Samples of the counters, and the series made from them. A gap stands where nobody looked. */
export class History {
  samples = [];

  /** time: the server's seconds; stats: of the arena map. */
  add(time, stats) {
    const last = this.samples.at(-1);
    if (last && (time < last.time || (stats.steps ?? 0) < (last.stats.steps ?? 0))) this.samples = []; // a new server
    this.samples.push({ time, stats, gap: false });
    while (this.samples.length > 2 && this.samples[1].time < time - SPAN - MINUTE) this.samples.shift();
  }

  /** Mark that what comes next does not continue what was. */
  pause() {
    if (this.samples.length) this.samples.at(-1).gap = true;
  }

  /** Latest sample at least `seconds` before sample i without a gap between, or the earliest such. */
  #before(i, seconds) {
    let j = i;
    while (j > 0 && !this.samples[j - 1].gap && this.samples[i].time - this.samples[j].time < seconds) j--;
    return this.samples[j];
  }

  /** Points {time, value} of what `value(sample, before)` makes of each sample and the one `seconds` earlier. */
  #series(seconds, value) {
    const points = [];
    const start = (this.samples.at(-1)?.time ?? 0) - SPAN;
    this.samples.forEach((sample, i) => {
      if (sample.time >= start) points.push({ time: sample.time, value: value(sample, this.#before(i, seconds)) });
      if (sample.gap) points.push({ time: sample.time, value: null });
    });
    return points;
  }

  #counted(seconds, name, perSecond) {
    return this.#series(seconds, (now, then) => {
      const passed = now.time - then.time;
      const n = (now.stats[name] ?? 0) - (then.stats[name] ?? 0);
      return passed > 0 ? (perSecond ? n / passed : n) : null;
    });
  }

  get tokens() {
    return this.#counted(RATE, "generation_tokens", true);
  }

  get preemptions() {
    return this.#counted(MINUTE, "preemptions", false);
  }

  get running() {
    return this.#series(0, (now) => now.stats.running);
  }

  get waiting() {
    return this.#series(0, (now) => now.stats.waiting);
  }

  /** Share of the prompt tokens of the last minute that cached pages held; null without prompts. */
  get hits() {
    return this.#series(MINUTE, (now, then) => {
      const asked = now.stats.prefix_query_tokens - then.stats.prefix_query_tokens;
      return asked > 0 ? (now.stats.prefix_hit_tokens - then.stats.prefix_hit_tokens) / asked : null;
    });
  }
}

/** Round up to a round number. */
export function niceCeiling(x) {
  if (!(x > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 3, 4, 5, 6, 8, 10].find((m) => m * power >= x * 0.999999) * power;
}

/**
 * Draw lines over the last SPAN seconds, or as far as there are points. lines: [{points, colour, fill}] from the front to
 * the back; top: the value at the upper edge.
 */
export function drawChart(canvas, lines, top) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (!width || !height) return;
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const pad = 2 * scale;
  const end = Math.max(...lines.map(({ points }) => points.at(-1)?.time ?? 0));
  const begin = Math.min(...lines.map(({ points }) => points[0]?.time ?? end));
  const span = Math.min(SPAN, Math.max(SHORTEST, end - begin));
  const x = (time) => width - pad - ((end - time) / span) * (width - 2 * pad);
  const y = (value) => height - pad - (Math.min(value, top) / top) * (height - 2 * pad);
  context.clearRect(0, 0, width, height);
  context.strokeStyle = style.getPropertyValue("--line");
  context.lineWidth = scale;
  for (const level of [0, top / 2, top]) {
    const at = Math.round(y(level)) + 0.5;
    context.beginPath();
    context.moveTo(0, at);
    context.lineTo(width, at);
    context.stroke();
  }
  context.lineJoin = "round";
  context.lineCap = "round";
  for (const { points, colour, fill } of [...lines].reverse()) {
    for (const run of runs(points)) {
      context.beginPath();
      run.forEach((point, i) => context[i ? "lineTo" : "moveTo"](x(point.time), y(point.value)));
      if (run.length === 1) context.lineTo(x(run[0].time) + scale, y(run[0].value));
      context.strokeStyle = style.getPropertyValue(colour);
      context.lineWidth = 1.6 * scale;
      context.stroke();
      if (fill && run.length > 1) {
        context.lineTo(x(run.at(-1).time), height - pad);
        context.lineTo(x(run[0].time), height - pad);
        context.globalAlpha = 0.13;
        context.fillStyle = style.getPropertyValue(colour);
        context.fill();
        context.globalAlpha = 1;
      }
    }
  }
}

/** Stretches of points between those without a value. */
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point.value === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}
