// The page: asks for a key where one is wanted, reads the stream, and draws what comes.

import { drawCharts } from "./charts.js";
import { openChat } from "./chat.js";
import { attribute, byId, say } from "./dom.js";
import { drawFigures } from "./figures.js";
import { drawPool } from "./pool.js";
import { ask, events } from "./stream.js";
import { drawTimeline } from "./timeline.js";
import { drawVerdict } from "./verdict.js";

const STREAM = "/dashboard/events";
const KEY = "jaxpaged.key";
const MAX_POINTS = 150;
const SILENCE_MS = 15000;
const [status, statusText, dialog, keyForm, keyInput, keyMessage, forget] =
  ["status", "status-text", "key-dialog", "key-form", "key", "key-message", "forget"].map(byId);

let points = [];
let attempt = 0;
let connection = null;

const readKey = () => sessionStorage.getItem(KEY) ?? "";

function show(state, text) {
  attribute(status, "data-state", state);
  attribute(document.body, "data-connection", ["ready", "starting", "draining"].includes(state) ? "live" : "lost");
  say(statusText, text);
}

function askForKey(sentence) {
  show("locked", "needs a key");
  say(keyMessage, sentence);
  say(forget, "Enter a key");
  forget.hidden = false;
  keyInput.value = "";
  if (!dialog.open) dialog.showModal();
  keyInput.focus();
}

function take(frame) {
  const known = new Map(points.map((point) => [point.at_s, point]));
  for (const point of frame.points) known.set(point.at_s, point);
  points = [...known.values()].sort((one, two) => one.at_s - two.at_s).slice(-MAX_POINTS);
  show(frame.phase, frame.message ? `${frame.phase}: ${frame.message}` : frame.phase);
  say(byId("model"), frame.model);
  say(byId("facts"), ["dtype", "platform", "attention"].map((name) => frame.facts[name]).filter(Boolean).join(" · "));
  say(forget, "Forget the key");
  forget.hidden = !readKey();
  drawVerdict(frame.verdict);
  drawFigures(frame, points);
  drawCharts(points, frame.time_s);
  drawPool(frame.pages, new Map(frame.requests.filter(({ name }) => name).map(({ id, name }) => [id, name])));
  drawTimeline(frame.requests, frame.time_s);
}

/** Reads until the stream ends; false: the server said that it stops. */
async function read(signal) {
  let silence = 0;
  const watch = () => { clearTimeout(silence); silence = setTimeout(() => connection?.abort(), SILENCE_MS); };
  try {
    const answer = await ask(STREAM, readKey(), { signal });
    if (dialog.open) dialog.close();
    for await (const { event, data } of events(answer)) {
      watch();
      attempt = 0;
      if (event === "end") return false;
      const told = JSON.parse(data);
      if (event === "history") points = told.points;
      else if (event === "frame") take(told);
    }
    return true;
  } finally {
    clearTimeout(silence);
  }
}

async function connect() {
  connection?.abort();
  const mine = new AbortController();
  connection = mine;
  let sentence = "disconnected";
  let wait = 0;
  try {
    if (!(await read(mine.signal))) sentence = "the server has stopped";
  } catch (error) {
    if (connection !== mine) return; // another attempt has taken over
    if (error.status === 401) {
      askForKey(readKey() ? error.message : "This server asks for an API key.");
      sessionStorage.removeItem(KEY);
      return;
    }
    if (error.status) {
      sentence = error.message;
      wait = error.retryAfter;
    }
  }
  if (connection !== mine) return;
  attempt += 1;
  for (let left = Math.max(wait, Math.min(15, 2 ** (attempt - 1))); left > 0; left -= 1) {
    show("lost", `${sentence}; next try in ${left} s`);
    await new Promise((resolve) => setTimeout(resolve, 1000));
    if (connection !== mine) return;
  }
  connect();
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, keyInput.value.trim());
  say(keyMessage, "");
  connect();
});
forget.addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  connection?.abort();
  connection = null;
  connect();
});
openChat(readKey);
drawPool(null);
drawTimeline([], 0);
connect();
