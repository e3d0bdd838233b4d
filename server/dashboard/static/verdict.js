// What the doctor says at present, in the words of its rules.

import { attribute, byId, el, number, say } from "./dom.js";

const [card, title, text, facts, also] = ["verdict", "verdict-title", "verdict-text", "verdict-facts", "verdict-also"].map(byId);

const QUIET = {
  early: ["Looking", "The doctor needs a few seconds of figures."],
  idle: ["Nothing to do", "No request ran in the last two minutes, so there is nothing to judge."],
  healthy: ["Healthy", "Nothing holds the engine up."],
};

let shown = "";

export function drawVerdict(verdict) {
  const asked = JSON.stringify(verdict);
  if (asked === shown) return;
  shown = asked;
  const [first, ...others] = verdict.findings;
  attribute(card, "data-state", first ? first.severity : verdict.state);
  if (!first) {
    say(title, QUIET[verdict.state][0]);
    say(text, QUIET[verdict.state][1]);
    facts.replaceChildren();
    say(also, "");
    return;
  }
  say(title, first.title[0].toUpperCase() + first.title.slice(1));
  say(text, `Change: ${first.remedy}. Expect: ${first.expect}.`);
  facts.replaceChildren(
    ...first.evidence.slice(0, 4).map(({ metric, value, unit, threshold }) =>
      el("div", {}, el("dt", {}, metric), el("dd", {}, `${number(value)} ${unit}`, el("span", {}, ` threshold ${number(threshold)} ${unit}`)))),
  );
  say(also, others.length ? `Also: ${others.map((one) => one.title).join("; ")}.` : "");
}
