/** Generated text as tokens: shaded by probability, with the other candidates on a click. */

import { element, percent, visibleNodes } from "./dom.js";
import { openMenu } from "./menu.js";
import { events } from "./service.js";
import { makeReachable, moveByKeys } from "./words.js";

export class TokenText {
  /** `choose(before, candidate)` is called with the text before a token and the candidate that was chosen in its place. */
  constructor(choose) {
    this.choose = choose;
    this.tokens = [];
    this.given = ""; // what stands before the tokens: the prompt, or an answer up to a chosen candidate
    this.tokenOf = new WeakMap();
    this.node = element("div", {
      class: "tokens", dir: "auto", role: "group",
      "aria-label": "Generated text. Arrow keys move from token to token, Enter shows candidates.",
    });
    this.node.addEventListener("click", (event) => {
      const token = this.tokenOf.get(event.target.closest?.(".token"));
      if (token && getSelection().isCollapsed) this.showCandidates(token);
    });
    moveByKeys(this.node, () => this.tokens, (token) => this.showCandidates(token));
  }

  get text() {
    return this.given + this.tokens.map((token) => token.text).join("");
  }

  /** Begin with a text that was given; `isFaint` if the model did not write it. */
  begin(text, isFaint = true) {
    this.tokens = [];
    this.given = text;
    this.node.replaceChildren(...(text ? [element("span", { class: isFaint ? "given" : "kept" }, visibleNodes(text))] : []));
  }

  add({ text, probability, top = [] }) {
    if (!text) return; // a part of a character, whose text comes with the next token
    const isKnown = typeof probability === "number";
    const node = element("span", { class: "token", title: isKnown && percent(probability) }, visibleNodes(text));
    if (isKnown) node.style.setProperty("--doubt", `${Math.round(55 * (1 - probability))}%`);
    const token = { node, text, probability, top: top.map((one) => ({ ...one, text: plain(one.text) })) };
    this.tokens.push(token);
    this.tokenOf.set(node, token);
    this.node.append(node);
    if (this.tokens.length === 1) makeReachable([], token);
  }

  /** End the text before a token. */
  cut(token) {
    for (const one of this.tokens.splice(this.tokens.indexOf(token))) one.node.remove();
  }

  showCandidates(token) {
    makeReachable(this.tokens, token);
    const menu = openMenu(token.node, `Candidates for ${token.text}`);
    if (!token.top.length) {
      menu.say("The server sent no candidates.");
      return;
    }
    const before = this.given + this.tokens.slice(0, this.tokens.indexOf(token)).map((one) => one.text).join("");
    menu.fill(token.top.map((candidate) => ({
      current: candidate.text === token.text,
      choose: () => (isSpecial(candidate.text) ? this.cut(token) : this.choose(before, candidate)),
      nodes: [
        element("bdi", { class: "next", dir: "auto" }, shown(candidate.text)),
        element("span", { class: "probability" }, percent(candidate.probability)),
      ],
    })));
  }
}

/** Return the text of a candidate, which may be a subword piece with a mark for its space. */
const plain = (piece) => piece.replaceAll("▁", " ");

/** Return whether a candidate is the end of the text or another special token, such as <eos>. */
const isSpecial = (text) => !text || /^<[^<>\s]+>$/.test(text);

/** Write the white space of a token, which would not be seen. */
const shown = (text) => text.replace(/^ /, "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(end)";

/** Ask for a continuation and add its tokens as they come; return how it ended. */
export async function receiveTokens(asked, target, signal) {
  let ended = null;
  for await (const { event, data } of events("/regard/generate", { top: 5, ...asked }, signal)) {
    if (signal.aborted) return null;
    if (event === "token") target.add(data);
    if (event !== "end") continue;
    target.add(data);
    ended = data;
  }
  return ended;
}

/** Settings of sampling: {node, values()}. */
export function samplingSettings(length, most) {
  const number = (label, value, more) => {
    const input = element("input", { type: "number", value, ...more });
    return [input, element("label", { class: "field" }, element("span", {}, label), input)];
  };
  const [temperature, first] = number("Temperature", "0.7", { min: "0", max: "2", step: "0.1" });
  const [tokens, second] = number("Most tokens", String(length), { min: "1", max: String(most), step: "1" });
  const values = () => ({
    temperature: Math.max(0, Number(temperature.value) || 0),
    max_tokens: Math.max(1, Math.round(Number(tokens.value)) || length),
  });
  return { node: element("div", { class: "row" }, first, second), values };
}
