/** Earlier translations, kept in this browser alone. */

import { button, element, iconButton, store, stored } from "./dom.js";

const ENTRIES = "regard.history";
const OFF = "regard.history.off";
const MOST = 50;
const LONGEST = 20_000; // characters of a text that is kept

function read() {
  try {
    const found = JSON.parse(stored("localStorage", ENTRIES) ?? "[]");
    const isEntry = (one) => typeof one?.text === "string" && typeof one.translation === "string";
    return Array.isArray(found) ? found.filter(isEntry) : [];
  } catch {
    return [];
  }
}

const write = (entries) => store("localStorage", ENTRIES, entries.length ? JSON.stringify(entries.slice(0, MOST)) : null);

export class History {
  /** `open` is called with an entry {text, translation, source, target} that was chosen. */
  constructor(open) {
    this.open = open;
    this.count = element("span", { class: "faint" });
    this.list = element("ul", { class: "history-list" });
    this.keep = element("input", { type: "checkbox", onchange: () => this.setKept(this.keep.checked) });
    this.keep.checked = stored("localStorage", OFF) === null;
    this.clearButton = button("Clear history", () => this.clear(), { class: "small" });
    this.node = element("details", { class: "history" }, element("summary", {}, "History ", this.count),
      element("p", { class: "history-tools" },
        element("label", {}, this.keep, " Keep history in this browser; nothing is sent."), this.clearButton), this.list);
    this.draw();
  }

  /** Add a translation. One that continues the newest text replaces it: it was typed on. */
  add(entry) {
    if (!this.keep.checked || !entry.text.trim() || entry.text.length > LONGEST) return;
    const others = read().filter((one) => !(one.text === entry.text && one.target === entry.target));
    const [newest] = others;
    if (newest && newest.target === entry.target && isContinued(newest.text, entry.text)) others.shift();
    write([entry, ...others]);
    this.draw();
  }

  setKept(kept) {
    store("localStorage", OFF, kept ? null : "1");
  }

  clear() {
    write([]);
    this.draw();
  }

  remove(at) {
    write(read().filter((_, i) => i !== at));
    this.draw();
  }

  draw() {
    const entries = read();
    this.count.textContent = entries.length ? String(entries.length) : "";
    this.clearButton.disabled = !entries.length;
    this.list.replaceChildren(...entries.map((entry, i) => element("li", {},
      button([
        element("span", { class: "direction" }, `${entry.source || "?"} → ${entry.target || "?"}`),
        element("bdi", { dir: "auto" }, shortened(entry.text)),
        element("bdi", { dir: "auto", class: "faint" }, shortened(entry.translation)),
      ], () => this.open(entry), { class: "entry" }),
      iconButton("close", "Remove this entry", () => this.remove(i)))));
    if (!entries.length) this.list.append(element("li", { class: "faint" }, "Nothing is kept."));
  }
}

const isContinued = (before, after) => after.startsWith(before) || before.startsWith(after);

const shortened = (text) => (text.length > 160 ? `${text.slice(0, 159)}…` : text);
