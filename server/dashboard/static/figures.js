// The figures of this moment.

import { attribute, byId, el, number, percent, say, seconds, svg } from "./dom.js";

const RECENT_S = 5;
const NAMES = ["Answers", "First token", "Token gap", "Running", "Waiting", "Page pool"];

const tiles = NAMES.map((name) => {
  const value = el("b", {}, "–");
  const detail = el("span", { class: "detail" }, "\u00a0");
  const fill = svg("rect", { class: "fill", x: 0, y: 0, height: 4, rx: 2, width: "0%" });
  const bar = svg("svg", { class: "meter none", height: 4, "aria-hidden": "true" }, svg("rect", { class: "track", width: "100%", height: 4, rx: 2 }), fill);
  return { value, detail, fill, bar, tile: el("li", { class: "card tile" }, el("span", { class: "name" }, name), value, detail, bar) };
});
byId("figures").append(...tiles.map(({ tile }) => tile));

function set(index, value, detail, share = null) {
  const tile = tiles[index];
  say(tile.value, value);
  say(tile.detail, detail);
  attribute(tile.bar, "class", share === null ? "meter none" : "meter");
  attribute(tile.fill, "width", `${Math.min(100, Math.max(0, (share ?? 0) * 100)).toFixed(1)}%`);
}

export function drawFigures(frame, points) {
  const last = points.at(-1);
  const limit = frame.limits.max_num_seqs;
  const [first, gap] = [last?.first_token ?? null, last?.gap ?? null];
  const recent = points.filter(({ at_s }) => at_s > frame.time_s - RECENT_S);
  set(0, number(recent.reduce((sum, { answers }) => sum + answers, 0) / Math.max(1, recent.length)), "tokens/s");
  set(1, seconds(first?.[0]), first ? `median · P95 ${seconds(first[1])}` : "none in 10 s");
  set(2, seconds(gap?.[0]), gap ? `median · P95 ${seconds(gap[1])}` : "none in 10 s");
  set(3, number(frame.running), limit ? `of ${number(limit)} at most` : "requests", limit ? frame.running / limit : null);
  set(4, number(frame.waiting), frame.waiting === 1 ? "request" : "requests");
  set(5, percent(frame.pool), frame.pages ? `of ${number(frame.pages.num_pages)} pages of ${frame.pages.page_size}` : "in use", frame.pool);
}
