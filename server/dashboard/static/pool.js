// The page pool as a map: a cell is one page or several, coloured by the request that holds it.

import { attribute, byId, el, hideTip, number, percent, say } from "./dom.js";

const MAX_COLOURS = 12;
const MAX_NAMED = 8;
const MAX_HEIGHT = 220;
const [canvas, sum, told, legend] = ["pool", "pool-sum", "pool-cell", "pool-legend"].map(byId);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

let pages = null;
let names = new Map();
let cursor = null;
let grid = { columns: 32, size: 10 };
let colours = null;

function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return { owners: Array.from({ length: MAX_COLOURS }, (_, i) => read(`--o${i}`)), cached: read("--cached"), free: read("--free"), ink: read("--ink"), card: read("--card") };
}

function measure() {
  const width = canvas.clientWidth;
  const count = pages ? pages.map.owners.length : 512;
  const size = Math.max(5, Math.min(20, Math.floor(Math.sqrt((width * MAX_HEIGHT) / count))));
  grid = { columns: Math.max(1, Math.floor(width / size)), size };
  const height = Math.ceil(count / grid.columns) * size;
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function draw() {
  if (!canvas.clientWidth) return;
  const context = measure();
  if (!pages) return;
  colours ??= palette();
  const { owners, used, cached, shared } = pages.map;
  const { columns, size } = grid;
  const gap = size > 7 ? 1.5 : 1;
  const chosen = cursor === null ? null : owners[cursor];
  for (let i = 0; i < owners.length; i += 1) {
    const [x, y, side] = [(i % columns) * size, Math.floor(i / columns) * size, size - gap];
    const owner = owners[i];
    const isDimmed = chosen !== null && chosen >= 0 && owner !== chosen;
    context.globalAlpha = (isDimmed ? 0.25 : 1) * (owner >= 0 ? 0.4 + (0.6 * Number(used[i])) / 9 : 1);
    context.fillStyle = owner >= 0 ? colours.owners[owner % MAX_COLOURS] : cached[i] !== "0" ? colours.cached : colours.free;
    context.beginPath();
    context.roundRect(x, y, side, side, Math.min(2.5, side / 4));
    context.fill();
    if (shared[i] !== "0") {
      // Held by several: a hole in the colour.
      context.globalAlpha = isDimmed ? 0.4 : 1;
      context.fillStyle = colours.card;
      context.beginPath();
      context.arc(x + side / 2, y + side / 2, Math.max(1.2, side / 4.5), 0, 2 * Math.PI);
      context.fill();
    }
    if (i === cursor) {
      context.globalAlpha = 1;
      context.strokeStyle = colours.ink;
      context.lineWidth = 1.5;
      context.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
    }
  }
  context.globalAlpha = 1;
}

function describe() {
  if (!pages || cursor === null || cursor >= pages.map.owners.length) {
    say(told, pages ? "Point at a cell, or use the arrow keys." : "");
    return;
  }
  const { owners, used, cached, shared, pages_per_cell: each } = pages.map;
  const from = cursor * each + 1;
  const to = Math.min(pages.num_pages, from + each - 1);
  const owner = pages.owners.find(([slot]) => slot === owners[cursor]);
  const where = from === to ? `Page ${from}` : `Pages ${from} to ${to}`;
  const who = owner ? `${each > 1 ? `${percent(used[cursor] / 9)} in use, most by ` : "held by "}${names.get(owner[1]) ?? owner[1]}` : cached[cursor] !== "0" ? "cached for its prefix, free to be taken" : "free";
  say(told, `${where}: ${who}${shared[cursor] !== "0" ? ", shared with others" : ""}.`);
}

function row(swatch, name, count) {
  return el("li", {}, el("i", { class: `swatch ${swatch}` }), el("span", { class: "id" }, name), ` ${count}`);
}

export function drawPool(body, named = new Map()) {
  pages = body;
  names = named;
  if (!pages) {
    say(sum, "");
    say(told, "The engine has not told yet who holds which page.");
    legend.replaceChildren();
    draw();
    return;
  }
  const { map } = pages;
  say(sum, map.num_shared ? `${number(map.num_shared)} shared, ${number(map.num_saved)} pages saved` : map.pages_per_cell > 1 ? `${map.pages_per_cell} pages a cell` : "a page a cell");
  const owners = [...pages.owners].sort((one, two) => two[2] - one[2]);
  const rows = owners.slice(0, MAX_NAMED).map(([slot, id, count]) => row(`o${slot % MAX_COLOURS}`, names.get(id) ?? id, count));
  if (owners.length > MAX_NAMED) rows.push(el("li", {}, `and ${owners.length - MAX_NAMED} more`));
  legend.replaceChildren(...rows, row("shared", "shared", ""), row("cached", "cached", ""), row("free", "free", ""));
  attribute(canvas, "aria-label", `Page pool: ${owners.length} requests hold pages, ${map.num_shared} pages are shared`);
  draw();
  describe();
}

function point(cell) {
  const count = pages ? pages.map.owners.length : 0;
  cursor = cell !== null && cell >= 0 && cell < count ? cell : null;
  draw();
  describe();
}

canvas.addEventListener("pointermove", (event) => {
  const column = Math.floor(event.offsetX / grid.size);
  point(column < grid.columns ? Math.floor(event.offsetY / grid.size) * grid.columns + column : null);
});
canvas.addEventListener("pointerleave", () => { point(null); hideTip(); });
canvas.addEventListener("blur", () => point(null));
canvas.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns }[event.key];
  if (event.key === "Escape") point(null);
  if (!step || !pages) return;
  event.preventDefault();
  const next = cursor === null ? 0 : cursor + step;
  point(Math.min(Math.max(0, next), pages.map.owners.length - 1));
});
new ResizeObserver(draw).observe(canvas.parentElement);
dark.addEventListener("change", () => { colours = null; draw(); });
