/** Texts as words that can be pointed at, focused and lit. */

import { element, visibleNodes } from "./dom.js";

const segmenters = new Map(); // language -> Intl.Segmenter

/** Return [begin, end] of each word of a text, in UTF-16 code units; the browser knows the words of Chinese as well. */
export function wordSpans(text, language) {
  if (!globalThis.Intl?.Segmenter) {
    return [...text.matchAll(/[\p{L}\p{N}\p{M}'’]+/gu)].map((word) => spanOf(word.index, word[0]));
  }
  if (!segmenters.has(language)) segmenters.set(language, segmenterOf(language));
  const parts = [...segmenters.get(language).segment(text)];
  return parts.filter((part) => part.isWordLike).map((part) => spanOf(part.index, part.segment));
}

const spanOf = (begin, word) => [begin, begin + word.length];

function segmenterOf(language) {
  try {
    return new Intl.Segmenter(language || undefined, { granularity: "word" });
  } catch {
    return new Intl.Segmenter(undefined, { granularity: "word" }); // a language that the browser does not know
  }
}

/**
 * Return the nodes of a text and its words, {node, text, begin, end}. `plain` leaves invisible characters as they are, which
 * keeps the text as wide as it is in a text field.
 */
export function wordNodes(text, language, plain = false) {
  const show = (part) => (plain ? [document.createTextNode(part)] : visibleNodes(part));
  const nodes = [];
  const words = [];
  let end = 0;
  for (const [from, to] of wordSpans(text, language)) {
    if (from > end) nodes.push(...show(text.slice(end, from)));
    const node = element("span", { class: "word" }, show(text.slice(from, to)));
    words.push({ node, text: text.slice(from, to), begin: from, end: to });
    nodes.push(node);
    end = to;
  }
  if (end < text.length) nodes.push(...show(text.slice(end)));
  return { nodes, words };
}

export const overlaps = (begin, end, from, to) => begin < to && from < end;

/**
 * Move the focus among words by the arrow keys. One word at a time is in the order of the Tab key, so that a long text is one
 * stop. `all` returns the words, `choose` is called on Enter and on the space bar.
 */
export function moveByKeys(container, all, choose) {
  container.addEventListener("keydown", (event) => {
    const words = all();
    const at = words.findIndex((word) => word.node === event.target);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") choose(words[at]);
    else {
      const next = target(event.key, words, at);
      if (!next) return;
      focusWord(words, next);
    }
    event.preventDefault();
  });
}

export function focusWord(words, word) {
  makeReachable(words, word);
  word.node.focus();
}

/** Make one word the one that the Tab key reaches. */
export function makeReachable(words, word) {
  for (const other of words) if (other !== word && other.node.tabIndex === 0) unreach(other.node);
  word.node.tabIndex = 0;
  word.node.setAttribute("role", "button");
  word.node.setAttribute("aria-haspopup", "menu");
}

function unreach(node) {
  node.tabIndex = -1;
  node.removeAttribute("role");
  node.removeAttribute("aria-haspopup");
}

function target(key, words, at) {
  if (key === "ArrowRight") return words[at + 1];
  if (key === "ArrowLeft") return words[at - 1];
  if (key === "Home") return words[0];
  if (key === "End") return words.at(-1);
  if (key === "ArrowDown" || key === "ArrowUp") return nextLine(words, at, key === "ArrowDown" ? 1 : -1);
  return null;
}

/** Return the nearest word of the line above (-1) or below (1). */
function nextLine(words, at, way) {
  const from = words[at].node.getBoundingClientRect();
  let best = null;
  for (let i = at + way, line = null; i >= 0 && i < words.length; i += way) {
    const box = words[i].node.getBoundingClientRect();
    if (Math.abs(box.top - from.top) < box.height / 2) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > box.height / 2) break;
    const off = Math.abs(box.left + box.width / 2 - from.left - from.width / 2);
    if (!best || off < best.off) best = { off, word: words[i] };
  }
  return best?.word;
}
