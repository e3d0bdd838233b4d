// Lines over the last two minutes, in SVG.

import { attribute, byId, el, hideTip, number, percent, say, seconds, showTip, svg } from "./dom.js";

const SPAN_S = 120;
const HOLE_S = 6;
const HEIGHT = 148;
const LEFT = 46;
const RIGHT = 6;
const TOP = 8;
const BOTTOM = 18;
const P = ["P50", "P95", "P99"];

const CHARTS = [
  { title: "Throughput", unit: "tokens/s", format: number, least: 10, series: [["answers", (p) => p.answers], ["prompts", (p) => p.prompts]], area: true },
  { title: "First token", unit: "seconds from arrival", format: seconds, least: 0.05, series: P.map((name, i) => [name, (p) => p.first_token?.[i] ?? null]) },
  { title: "Token gap", unit: "seconds between tokens", format: seconds, least: 0.02, series: P.map((name, i) => [name, (p) => p.gap?.[i] ?? null]) },
  { title: "Requests", unit: "at the same time", format: number, least: 4, series: [["running", (p) => p.running], ["waiting", (p) => p.waiting]], area: true },
  { title: "Batch", unit: "sequences per step", format: number, least: 4, series: [["sequences", (p) => p.batch]], area: true },
  { title: "Padding and device", unit: "shares of a step", format: percent, least: 1, most: 1, series: [["padding", (p) => p.padding], ["device time", (p) => p.device]] },
];

/** The next round number. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 4, 5, 8, 10].map((step) => step * power).find((step) => step >= value - 1e-12);
}

class Chart {
  constructor(plan) {
    this.plan = plan;
    this.points = [];
    this.cursor = null;
    this.title = el("h2", {}, plan.title);
    this.values = plan.series.map(([name], i) => {
      const value = el("b", {}, "–");
      return { value, row: el("li", { class: `s${i}` }, el("i", { class: "swatch" }), `${name} `, value) };
    });
    this.plot = svg("svg", { class: "plot", role: "img", tabindex: "0", height: HEIGHT });
    this.grid = svg("g", { class: "grid", visibility: "hidden" });
    this.area = svg("path", { class: "area" });
    this.lines = plan.series.map((_, i) => svg("path", { class: `line s${i}` }));
    this.rule = svg("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.nothing = svg("text", { class: "nothing", "text-anchor": "middle", visibility: "hidden", y: (HEIGHT - BOTTOM + TOP) / 2 - 10 }, "nothing yet");
    this.ticks = [0, 0.5, 1].map(() => {
      const line = svg("line", {});
      const label = svg("text", { "text-anchor": "end", x: LEFT - 8 });
      this.grid.append(line, label);
      return { line, label };
    });
    this.then = svg("text", { y: HEIGHT - 3, x: LEFT }, "2 min ago");
    this.now = svg("text", { y: HEIGHT - 3, "text-anchor": "end" }, "now");
    this.grid.append(this.then, this.now);
    this.plot.append(this.grid, this.area, ...[...this.lines].reverse(), this.rule, this.nothing);
    this.card = el("article", { class: "card chart" },
      el("div", { class: "head" }, this.title, el("span", { class: "unit" }, plan.unit)),
      el("ul", { class: "legend" }, ...this.values.map(({ row }) => row)), this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("blur", () => this.leave());
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  update(points, now) {
    this.points = points.filter((point) => point.at_s > now - SPAN_S - 2);
    this.at = now;
    this.draw();
    const last = this.points.at(-1);
    const told = this.plan.series.map(([name, read], i) => {
      const text = this.plan.format(last ? read(last) : null);
      say(this.values[i].value, text);
      return `${name} ${text}`;
    });
    attribute(this.plot, "aria-label", `${this.plan.title}, ${this.plan.unit}: ${told.join(", ")}`);
  }

  x(at) {
    return LEFT + (1 - (this.at - at) / SPAN_S) * (this.width - LEFT - RIGHT);
  }

  draw() {
    this.width = this.plot.clientWidth;
    if (!this.width || this.at === undefined) return;
    const { plan, points } = this;
    attribute(this.grid, "visibility", "visible");
    attribute(this.plot, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const values = points.flatMap((point) => plan.series.map(([, read]) => read(point)).filter((value) => value !== null));
    const most = plan.most ?? round(Math.max(plan.least, ...values));
    const y = (value) => TOP + (1 - Math.min(value, most) / most) * (HEIGHT - TOP - BOTTOM);
    this.ticks.forEach(({ line, label }, i) => {
      const value = (most * i) / 2;
      const place = y(value).toFixed(1);
      for (const [name, where] of [["x1", LEFT], ["x2", this.width - RIGHT], ["y1", place], ["y2", place]]) attribute(line, name, where);
      attribute(label, "y", y(value) + 4);
      say(label, value ? plan.format(value) : "0");
    });
    attribute(this.now, "x", this.width - RIGHT);
    attribute(this.nothing, "x", (this.width + LEFT) / 2);
    attribute(this.nothing, "visibility", values.length ? "hidden" : "visible");
    plan.series.forEach(([, read], i) => {
      const parts = [];
      let before = -Infinity;
      for (const point of points) {
        const value = read(point);
        if (value === null) continue;
        // A time in which nothing was told is a hole, and not a slope; slow steps leave seconds out.
        if (point.at_s - before > HOLE_S) parts.push([]);
        parts.at(-1).push([Math.max(LEFT, this.x(point.at_s)).toFixed(1), y(value).toFixed(1)]);
        before = point.at_s;
      }
      const paths = parts.map((part) => `M${part.map((place) => place.join(" ")).join("L")}`);
      attribute(this.lines[i], "d", paths.map((path) => `${path}h0`).join(""));
      if (i > 0 || !plan.area) return;
      const floor = HEIGHT - BOTTOM;
      attribute(this.area, "d", paths.map((path, n) => `${path}L${parts[n].at(-1)[0]} ${floor}L${parts[n][0][0]} ${floor}Z`).join(""));
    });
  }

  point(x) {
    if (!this.points.length) return;
    const nearest = this.points.reduce((best, point) => (Math.abs(this.x(point.at_s) - x) < Math.abs(this.x(best.at_s) - x) ? point : best));
    this.mark(nearest);
  }

  mark(point) {
    this.cursor = point;
    const x = Math.max(LEFT, this.x(point.at_s));
    attribute(this.rule, "x1", x);
    attribute(this.rule, "x2", x);
    attribute(this.rule, "visibility", "visible");
    const rows = this.plan.series.map(([name, read], i) => el("li", { class: `s${i}` }, el("i", { class: "swatch" }), `${name} `, el("b", {}, this.plan.format(read(point)))));
    const box = this.plot.getBoundingClientRect();
    showTip(box.left + x, box.top + TOP, el("p", {}, new Date(point.at_s * 1000).toLocaleTimeString()), el("ul", { class: "legend down" }, ...rows));
  }

  leave() {
    if (!this.cursor) return;
    this.cursor = null;
    attribute(this.rule, "visibility", "hidden");
    hideTip();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.leave();
    if (!step || !this.points.length) return;
    event.preventDefault();
    const at = this.cursor ? this.points.findIndex((point) => point.at_s === this.cursor.at_s) : this.points.length - (step > 0 ? 1 : 0);
    this.mark(this.points[Math.min(Math.max(0, at + step), this.points.length - 1)]);
  }
}

const charts = CHARTS.map((plan) => new Chart(plan));
byId("charts").append(...charts.map((chart) => chart.card));

export function drawCharts(points, now) {
  for (const chart of charts) chart.update(points, now);
}
