"use strict";
/** All scripts share one global object, with one part per file: Regard.dom, Regard.heat, ... */
const Regard = {};

/**
 * Create elements, and format tokens and numbers.
 *
 * Text of the document only ever becomes a text node or an attribute: it is never read as markup.
 */
Regard.dom = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  /** element("p", {class: "faint", onclick: f}, "text", another, [more]); null and false are left out. */
  function element(name, attributes = {}, ...children) {
    return filled(document.createElement(name), attributes, children);
  }

  function svg(name, attributes = {}, ...children) {
    return filled(document.createElementNS(SVG, name), attributes, children);
  }

  function filled(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (key === "style") node.style.cssText = value; // as an attribute a strict content policy would refuse it
      else node.setAttribute(key, value);
    }
    node.append(...children.flat(Infinity).filter((child) => child || child === 0 || child === ""));
    return node;
  }

  /** `data-key` lets a button keep the focus when the page is redrawn. */
  function button(label, onclick, more = {}) {
    return element("button", { type: "button", onclick, ...more }, label);
  }

  /** A toggle button. */
  function choice(label, pressed, onclick, key, more = {}) {
    return button(label, onclick, { class: "choice", "aria-pressed": String(pressed), "data-key": key, ...more });
  }

  function group(label, ...children) {
    const name = element("span", { class: "label" }, label);
    return element("div", { class: "group", role: "group", "aria-label": label }, name, children);
  }

  function select(label, options, value, onchange, key) {
    const made = options.map(([name, text]) => element("option", { value: name, selected: name === value && "" }, text));
    made.find((option) => option.value === value).selected = true;
    const box = element("select", { "data-key": key, onchange: (event) => onchange(event.target.value) }, made);
    return element("label", { class: "group" }, element("span", { class: "label" }, label), box);
  }

  function controls(...children) {
    return element("div", { class: "controls" }, children);
  }

  /** The text for the number under the pointer, which screen readers announce. */
  function readout(text) {
    return element("p", { class: "readout", "aria-live": "polite" }, text);
  }

  function card(title, ...children) {
    return element("section", { class: "card" }, title && element("h2", {}, title), children);
  }

  function faint(...children) {
    return element("p", { class: "faint" }, children);
  }

  function table(names, rows, more = {}) {
    const head = element("tr", {}, names.map((name) => element("th", { scope: "col" }, name)));
    return element("table", more, element("thead", {}, head), element("tbody", {}, rows));
  }

  // ---- tokens --------------------------------------------------------------------------------------------------------

  const SPACES = { "\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣", "\u00a0": "⍽" };

  /** Return a token as text without invisible characters; "▁" already marks a space. */
  function visible(piece) {
    const text = String(piece ?? "");
    return text === "" ? "∅" : harmless(text.replace(/[\n\r\t \u00a0]/g, (char) => SPACES[char]));
  }

  /** Write invisible and bidirectional control characters as code points. Joiners stay: emoji and many scripts need them. */
  function harmless(text) {
    const hidden = /[\p{Cc}\p{Cf}\u2028\u2029]/gu;
    const joins = (char) => /[\u200c\u200d\u{e0020}-\u{e007f}]/u.test(char) && [...text].length > 1;
    const number = (char) => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`;
    return text.replace(hidden, (char) => (char === "\n" ? char : joins(char) ? char : number(char)));
  }

  function shortened(text, most) {
    const chars = [...text];
    return chars.length > most ? `${chars.slice(0, most - 1).join("")}…` : text;
  }

  /** A token inside a line of text, with its own text direction and a faint mark for a space. */
  function token(piece, more = {}) {
    const text = visible(piece);
    const spaced = text.startsWith("▁") && text.length > 1;
    const parts = spaced ? [element("span", { class: "space" }, "▁"), text.slice(1)] : text;
    return element("bdi", { dir: "auto", ...more, class: `token ${more.class ?? ""}`.trim() }, parts);
  }

  // ---- numbers -------------------------------------------------------------------------------------------------------

  /** Format with all digits of fp32, or with as many as are certain if a value may be off by `error`. */
  function exact(value, error = 0) {
    if (!Number.isFinite(value)) return value > 0 ? "∞" : value < 0 ? "−∞" : "not a number";
    if (error) return `${fixed(value, Math.max(2, Math.ceil(-Math.log10(error))))} ± ${error.toPrecision(1)}`;
    return minus(Math.abs(value) < 1e-4 && value !== 0 ? value.toExponential(5) : value.toFixed(6));
  }

  /** Format with three digits. */
  function brief(value) {
    if (!Number.isFinite(value)) return exact(value);
    const size = Math.abs(value);
    if (size === 0) return "0";
    return minus(size >= 1e5 || size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3))));
  }

  const minus = (text) => text.replace(/^-/, "−");
  const fixed = (value, digits) => minus(value.toFixed(digits));

  function percent(p) {
    if (p >= 0.0995 && p < 0.995) return `${(100 * p).toFixed(0)} %`;
    return p === 0 || p >= 0.00095 ? `${(100 * p).toFixed(1)} %` : `${(100 * p).toPrecision(1)} %`;
  }

  /** A share from 0 to 1 as a bar of that length. */
  function bar(share, label, more = {}) {
    const width = (100 * Math.min(1, Math.max(0, share))).toFixed(2);
    const inner = element("span", { class: "bar-fill", style: `width:${width}%` });
    return element("span", { class: "bar", ...more }, inner, element("span", { class: "bar-label" }, label));
  }

  // ---- tooltip -------------------------------------------------------------------------------------------------------

  function tip(event, lines) {
    const box = document.getElementById("tip");
    box.replaceChildren(...lines.map((line) => element("div", {}, line)));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 10 : event.clientX + 14;
    const top = event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.max(4, top)}px`;
  }

  function untip() {
    document.getElementById("tip").hidden = true;
  }

  return {
    element, svg, button, choice, group, select, controls, readout, card, faint, table,
    visible, harmless, shortened, token, exact, brief, fixed, percent, bar, tip, untip,
  };
})();
