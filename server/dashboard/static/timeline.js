// The last requests: how long each waited, read its prompt, and answered.

import { attribute, byId, el, say, seconds, svg } from "./dom.js";

const SPANS_S = [5, 10, 20, 30, 60];
const SCALE = 1000;
const PHASES = ["queue", "prefill", "decode"];
const MAX_COLOURS = 12;

const region = byId("timeline");
const rows = new Map();
const empty = el("p", { class: "empty" }, "No request in the last minute. Ask something in the chat, or send one to /v1/chat/completions.");
const ago = el("span", {}, "");
const axis = el("div", { class: "axis", "aria-hidden": "true" }, ago, el("span", {}, "now"));

function make() {
  const swatch = el("i", { class: "swatch" });
  const name = el("span", { class: "id" });
  const detail = el("span", { class: "detail", "aria-hidden": "true" });
  const words = el("span", { class: "visually-hidden" });
  const bars = PHASES.map((phase) => svg("rect", { class: phase, y: 2, height: 8, rx: 1 }));
  const losses = svg("g", { class: "losses" });
  const plot = svg("svg", { viewBox: `0 0 ${SCALE} 12`, preserveAspectRatio: "none", height: 12, "aria-hidden": "true" }, ...bars, losses);
  return { swatch, name, detail, words, bars, losses, element: el("div", { class: "row" }, el("span", { class: "who" }, swatch, name), plot, detail, words) };
}

function draw(row, request, now, span) {
  const x = (at) => Math.min(SCALE, Math.max(0, (1 - (now - at) / span) * SCALE));
  const end = request.finished_s ?? now;
  const begun = request.scheduled_s ?? end;
  const first = request.first_token_s ?? end;
  [[request.queued_s, begun], [begun, first], [first, end]].forEach(([from, to], i) => {
    attribute(row.bars[i], "x", x(from).toFixed(1));
    attribute(row.bars[i], "width", Math.max(0, x(to) - x(from)).toFixed(1));
  });
  row.losses.replaceChildren(...request.preempted_s.map((at) => svg("rect", { x: x(at).toFixed(1), y: 0, width: 3, height: 12 })));
  say(row.name, request.name || request.id);
  attribute(row.name, "title", request.name ? `${request.name} (${request.id})` : request.id);
  attribute(row.swatch, "class", request.slot === null ? "swatch none" : `swatch o${request.slot % MAX_COLOURS}`);
  const tokens = `${request.num_prompt_tokens}${request.num_output_tokens === null ? "" : ` + ${request.num_output_tokens}`} tok`;
  const state = request.reason || (request.scheduled_s === null ? "waits" : request.first_token_s === null ? "reads" : "answers");
  const took = seconds(Math.max(0, end - request.queued_s));
  const words = `${state}, ${tokens}, ${took}`;
  say(row.detail, request.reason && !["stop", "length"].includes(request.reason) ? request.reason : took);
  say(row.words, words);
  attribute(row.element, "title", words);
  attribute(row.element, "data-reason", request.reason || "open");
}

export function drawTimeline(requests, now) {
  if (!requests.length) {
    rows.clear();
    region.replaceChildren(empty);
    return;
  }
  const oldest = now - Math.min(...requests.map((request) => request.queued_s));
  const span = SPANS_S.find((seconds) => seconds >= oldest) ?? SPANS_S.at(-1);
  say(ago, `${span} s ago`);
  const seen = new Set();
  const order = requests.map((request) => {
    seen.add(request.id);
    if (!rows.has(request.id)) rows.set(request.id, make());
    const row = rows.get(request.id);
    draw(row, request, now, span);
    return row.element;
  });
  for (const id of rows.keys()) if (!seen.has(id)) rows.delete(id);
  const wanted = [axis, ...order];
  if (wanted.length !== region.children.length || wanted.some((element, i) => region.children[i] !== element)) region.replaceChildren(...wanted);
}
