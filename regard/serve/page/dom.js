/**
 * Elements, icons and small parts that all tabs use.
 *
 * Text only ever becomes a text node or an attribute: it is never read as markup. Styles are set as properties, because the
 * content policy of the server allows no style attributes.
 */

const SVG = "http://www.w3.org/2000/svg";

/** element("p", {class: "faint", onclick: f}, "text", another, [more]); null, undefined and false are left out. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return node;
}

export const button = (label, onclick, more = {}) => element("button", { type: "button", onclick, ...more }, label);

const ICONS = {
  swap: "M7 4 3 8l4 4M3 8h14M17 12l4 4-4 4M21 16H7",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  close: "M6 6l12 12M18 6 6 18",
  file: "M14 3H6v18h12V7zM14 3v4h4",
  clock: "M12 7v5l3 2M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18",
  done: "M5 12l5 5L20 7",
  stop: "M7 7h10v10H7z",
  look: "M3 12s3.5-6 9-6 9 6 9 6-3.5 6-9 6-9-6-9-6zM12 9.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5",
  dark: "M20 14a8 8 0 1 1-10-10 7 7 0 0 0 10 10",
  light:
    "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6 19 19M5 19l1.4-1.4M17.6 6.4 19 5",
};

/** A drawing of 24 by 24 units that screen readers skip. */
export function icon(name) {
  const drawn = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  drawn.setAttribute("viewBox", "0 0 24 24");
  drawn.setAttribute("class", "icon");
  drawn.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  drawn.append(path);
  return drawn;
}

/** A button with an icon alone, which has its name as a label and a tooltip. */
export function iconButton(name, label, onclick, more = {}) {
  return button(icon(name), onclick, { class: "quiet round", "aria-label": label, title: label, ...more });
}

/** A list of options, [value, text] each, with a label; `onchange` gets the new value. */
export function select(label, options, value, onchange, more = {}) {
  const box = element("select", { "aria-label": label, onchange: () => onchange(box.value), ...more });
  fillSelect(box, options, value);
  return box;
}

export function fillSelect(box, options, value) {
  box.replaceChildren(...options.map(([name, text]) => element("option", { value: name }, text)));
  box.value = options.some(([name]) => name === value) ? value : options[0]?.[0];
}

/** A choice of a model: {box, node}; the node is hidden where there is only one model. */
export function modelChoice(models, onchange = () => {}) {
  const box = select("Model", models.map((one) => [one.name, one.name]), models[0].name, onchange);
  const node = field("Model", box);
  node.hidden = models.length < 2;
  return { box, node };
}

/** A label above or beside a control. */
export const field = (label, control) => element("label", { class: "field" }, element("span", {}, label), control);

/** A share from 0 to 1 as a bar of that length, with a label on it. */
export function bar(share, label) {
  const inner = element("span", { class: "bar-fill" });
  inner.style.width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;
  return element("span", { class: "bar" }, inner, element("span", { class: "bar-label" }, label));
}

export const capitalized = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

/** Return a message without the options of the command line that it names, which a reader of the page does not have. */
export const withoutOptions = (text) => capitalized(text.replace(/ \(--[^()]*\)/g, ""));

export function percent(p) {
  if (p >= 0.995) return "100 %";
  if (p >= 0.0995) return `${(100 * p).toFixed(0)} %`;
  return p >= 0.00095 || p === 0 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %";
}

/** Tell screen readers what happened. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

/** Call a function once no further call came for a while. */
export function debounced(run, milliseconds) {
  let timer = 0;
  const later = (...given) => {
    clearTimeout(timer);
    timer = setTimeout(run, milliseconds, ...given);
  };
  later.cancel = () => clearTimeout(timer);
  return later;
}

// ---- characters that cannot be seen ------------------------------------------------------------------------------------

const DIRECTION = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const NAMES = {
  "\u061c": "Arabic letter mark", "\u200e": "left-to-right mark", "\u200f": "right-to-left mark",
  "\u202a": "left-to-right embedding", "\u202b": "right-to-left embedding", "\u202c": "end of embedding",
  "\u202d": "left-to-right override", "\u202e": "right-to-left override", "\u2066": "left-to-right isolate",
  "\u2067": "right-to-left isolate", "\u2068": "first strong isolate", "\u2069": "end of isolate",
};

/** Return the direction controls of a text. */
export const directionControls = (text) => text.match(DIRECTION) ?? [];

export const withoutDirectionControls = (text) => text.replace(DIRECTION, "");

export const codePoint = (char) => `U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

/** Return a text as nodes; characters that cannot be seen, or that turn the text around, are written as code points. */
export function visibleNodes(text) {
  const hidden = /([\p{Cc}\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\u2028\u2029])/u;
  return text.split(hidden).filter(Boolean).map((part) => {
    if (!hidden.test(part) || part === "\n" || part === "\t") return document.createTextNode(part);
    return element("span", { class: "control", title: NAMES[part] ?? "invisible character" }, codePoint(part));
  });
}

// ---- storage: a browser may refuse it ----------------------------------------------------------------------------------

export function stored(storage, key) {
  try {
    return globalThis[storage].getItem(key);
  } catch {
    return null;
  }
}

export function store(storage, key, value) {
  try {
    if (value === null) globalThis[storage].removeItem(key);
    else globalThis[storage].setItem(key, value);
  } catch {
    // The page works without it.
  }
}
