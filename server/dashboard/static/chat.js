// A conversation with the model, whose tokens show how probable they were and what else could have come.

import { byId, el, hideTip, percent, say, showTip } from "./dom.js";
import { ask, events } from "./stream.js";

const CHAT = "/v1/chat/completions";
const NUM_ALTERNATIVES = 5;
const [log, form, input, send, temperature, limit, clear] =
  ["chat-log", "chat-form", "chat-input", "chat-send", "chat-temperature", "chat-tokens", "chat-clear"].map(byId);
const empty = el("p", { class: "empty" }, "Say something to the model. What it answers is made by the engine that you see here.");

let messages = [];
let running = null;
let readKey = () => "";

/** Spaces and line ends that can be seen. */
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

function bubble(role, name) {
  const body = el("div", { class: "text" });
  const box = el("div", { class: `message ${role}` }, el("p", { class: "by" }, name), body);
  empty.remove();
  log.append(box);
  return body;
}

function tipOf(token) {
  const chosen = Math.exp(token.logprob);
  const others = [...(token.top_logprobs ?? [])];
  if (!others.some(({ token: text }) => text === token.token)) others.push(token);
  const rows = others.map(({ token: text, logprob }) => {
    const share = Math.exp(logprob);
    const bar = el("meter", { min: "0", max: "1", value: share.toFixed(4) });
    return el("tr", text === token.token ? { class: "chosen" } : {}, el("td", {}, visible(text)), el("td", {}, bar), el("td", {}, percent(share, 1)));
  });
  const table = el("table", {}, el("caption", {}, `“${visible(token.token)}” ${percent(chosen, 1)}`), el("tbody", {}, ...rows));
  return table;
}

class Answer {
  constructor() {
    this.body = bubble("assistant", "Model");
    this.body.setAttribute("tabindex", "0");
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", "Answer; left and right go through its tokens");
    this.text = "";
    this.decoder = new TextDecoder();
    this.tokens = [];
    this.current = -1;
    this.body.addEventListener("pointerover", (event) => this.over(event.target));
    this.body.addEventListener("pointerleave", () => this.leave());
    this.body.addEventListener("blur", () => this.leave());
    this.body.addEventListener("keydown", (event) => this.key(event));
  }

  add(choice) {
    const told = choice.logprobs?.content ?? [];
    this.text += choice.delta?.content ?? "";
    if (!told.length) {
      if (choice.delta?.content) this.body.append(choice.delta.content);
      return;
    }
    for (const token of told) {
      // A character may be made of several tokens, and is shown with the last of them.
      const text = token.bytes ? this.decoder.decode(Uint8Array.from(token.bytes), { stream: true }) : token.token;
      const shade = Math.min(9, Math.floor(Math.exp(token.logprob) * 10));
      const span = el("span", { class: `token p${shade}`, "data-index": this.tokens.length }, text);
      this.tokens.push({ token, span });
      this.body.append(span);
    }
  }

  over(target) {
    if (target.dataset?.index !== undefined) this.show(Number(target.dataset.index));
  }

  show(index) {
    this.tokens[this.current]?.span.classList.remove("current");
    this.current = index;
    const { token, span } = this.tokens[index];
    span.classList.add("current");
    const box = span.getBoundingClientRect();
    showTip(box.left, box.top, tipOf(token));
  }

  leave() {
    this.tokens[this.current]?.span.classList.remove("current");
    this.current = -1;
    hideTip();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.leave();
    if (!step || !this.tokens.length) return;
    event.preventDefault();
    this.show(Math.min(Math.max(0, this.current + step), this.tokens.length - 1));
  }
}

async function open(signal, extra) {
  const body = { messages, stream: true, max_tokens: Number(limit.value) || 256, temperature: Number(temperature.value) || 0, ...extra };
  return ask(CHAT, readKey(), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
}

async function answer(signal) {
  let stream;
  try {
    stream = await open(signal, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  } catch (error) {
    if (!["logprobs", "top_logprobs"].includes(error.param)) throw error;
    stream = await open(signal, {}); // this server tells no probabilities
  }
  const made = new Answer();
  try {
    for await (const { data } of events(stream)) {
      if (data === "[DONE]") break;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      for (const choice of told.choices ?? []) made.add(choice);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }
  } finally {
    if (made.text) messages.push({ role: "assistant", content: made.text });
  }
}

async function submit() {
  const text = input.value.trim();
  if (running) {
    running.abort();
    return;
  }
  if (!text) return;
  messages.push({ role: "user", content: text });
  bubble("user", "You").append(text);
  log.scrollTop = log.scrollHeight;
  input.value = "";
  running = new AbortController();
  say(send, "Stop");
  try {
    await answer(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      bubble("failure", "Not answered").append(error.message);
      if (messages.at(-1)?.role === "user") messages.pop();
      log.scrollTop = log.scrollHeight;
    }
  } finally {
    running = null;
    say(send, "Send");
  }
}

export function openChat(key) {
  readKey = key;
  log.append(empty);
  form.addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) submit();
    }
  });
  clear.addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren(empty);
    hideTip();
    input.focus();
  });
}
