/**
 * The Look tab: the look page on what was just translated, live.
 *
 * The look page is in a frame, because its scripts and style are made for a page of their own. The controls around it change
 * the model for one request: heads, links, positions and the beam. The translation without changes stays beside the new one.
 */

import { announce, button, capitalized, element, field, fillSelect, iconButton, modelChoice, select } from "./dom.js";
import { Notice } from "./notice.js";
import { post } from "./service.js";

const ALL_CROSS = "*cross";
const SCHEMES = [
  ["", "as trained"], ["none", "none"], ["sinusoidal", "sinusoidal"], ["rope", "rotary (RoPE)"], ["yarn", "YaRN"],
  ["alibi", "ALiBi"],
];
const BEAMS = [1, 2, 3, 4, 5, 6, 8];

export class LookTab {
  constructor(app, models) {
    this.app = app;
    this.models = models;
    this.changes = []; // {kind, value, said}
    this.before = ""; // the output without changes
    this.view = null; // the first view of the document, whose words can be chosen
    this.asked = null; // what is looked at: {text, to, model}
    this.pending = null; // the document for the frame until the frame is ready
    this.notice = new Notice();
    this.build();
  }

  // ---- parts -----------------------------------------------------------------------------------------------------------

  build() {
    this.text = element("textarea", {
      id: "look-text", rows: "1", dir: "auto", spellcheck: "false", "aria-label": "Text to look into",
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      this.look();
    });
    const model = modelChoice(this.models, () => this.fillTargets());
    this.model = model.box;
    this.to = select("Target language", [], "", () => this.look());
    this.toField = field("Into", this.to);
    this.sentence = select("Sentence", [], "", (i) => this.chooseSentence(Number(i)));
    this.sentenceField = field("Sentence", this.sentence);
    this.fillTargets();
    const form = element("form", { class: "look-form", onsubmit: (event) => { event.preventDefault(); this.look(); } },
      this.text, element("div", { class: "row" }, this.sentenceField, model.node, this.toField,
        element("button", { type: "submit", class: "strong" }, "Look")));
    this.outputs = element("div", { class: "outputs" });
    this.picked = element("div", { class: "picked", role: "region", "aria-label": "Chosen cell", hidden: true });
    this.frame = element("iframe", { class: "look-frame", title: "Attention, activations and predictions of the model" });
    const first = this.models.some((one) => one.task === "translation") ? "Translate something first, or write" : "Write";
    this.hint = element("p", { class: "empty faint" }, `${first} a sentence above.`);
    this.workbench = element("div", { hidden: true }, this.outputs, this.panel(), this.frame, this.picked);
    this.node = element("div", { class: "look" }, form, this.notice.node, this.hint, this.workbench);
    addEventListener("message", (event) => this.receive(event));
    addEventListener("theme-changed", () => this.sendTheme());
  }

  panel() {
    this.layer = select("Layer", [], "", () => this.fillHeads());
    this.head = select("Head", [], "", () => {});
    this.query = select("From word", [], "", () => {});
    this.key = select("To word", [], "", () => {});
    this.where = select("Where", [["all", "everywhere"], ["head", "in this head only"]], "all", () => this.fillWords());
    this.beam = select("Beam", [], "", () => this.look(false));
    this.positions = select("Position scheme", SCHEMES, "", (name) => this.setPositions(name));
    this.chips = element("ul", { class: "chips", "aria-label": "Changes" });
    const group = (title, ...parts) => element("fieldset", {}, element("legend", {}, title),
      element("div", { class: "row" }, parts));
    const arrow = element("span", { class: "arrow", "aria-hidden": "true" }, "→");
    return element("div", { class: "panel" },
      group("Head", field("Layer", this.layer), field("Head", this.head),
        button("Switch off", () => this.changeHead("zero")), button("Make uniform", () => this.changeHead("uniform"))),
      group("Link", field("Word", this.query), arrow, field("attends to", this.key), field("Where", this.where),
        button("Forbid", () => this.changeLink("forbid")), button("Force", () => this.changeLink("force"))),
      group("Decoding", field("Beam", this.beam), field("Position scheme", this.positions)),
      this.chips);
  }

  fillTargets() {
    const model = this.models.find((one) => one.name === this.model.value);
    const targets = new Set((model.directions ?? []).map((one) => one.split(">")[1]));
    this.toField.hidden = !targets.size;
    const known = (model.languages ?? []).filter((one) => targets.has(one.code));
    fillSelect(this.to, [["", "Automatic"], ...known.map((one) => [one.code, capitalized(one.name)])], this.to.value);
  }

  // ---- what is looked at -----------------------------------------------------------------------------------------------

  /** The tab is opened: look at the first sentence that was translated since the last time. */
  show() {
    const { translated } = this.app;
    this.sentenceField.hidden = !translated || translated.sentences.length < 2;
    if (!translated || translated === this.seen) return;
    this.seen = translated;
    const shorten = (text) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);
    const numbered = translated.sentences.map((one, i) => [String(i), `${i + 1}. ${shorten(one.text.trim())}`]);
    fillSelect(this.sentence, numbered, "0");
    this.model.value = translated.model;
    this.fillTargets();
    this.to.value = translated.target ?? "";
    this.chooseSentence(0);
  }

  chooseSentence(i) {
    this.text.value = this.seen.sentences[i].text.trim();
    this.look();
  }

  /** Look at a text without changes (isNew), or at the same one with other settings. */
  async look(isNew = true) {
    const text = this.text.value.trim();
    if (!text) return;
    if (isNew || !this.asked) {
      this.changes = [];
      this.beam.value = this.positions.value = "";
      this.asked = { text, model: this.model.value, to: this.to.value || undefined };
      this.before = "";
    }
    this.drawChips();
    await this.ask(isNew);
  }

  async ask(isNew) {
    this.running?.abort();
    const running = new AbortController();
    this.running = running;
    this.node.classList.add("busy");
    const beam = Number(this.beam.value) || undefined;
    const started = performance.now();
    const again = () => this.ask(isNew);
    try {
      const changes = this.changes.map(({ kind, value }) => ({ kind, value }));
      const path = changes.length ? "/regard/change" : "/regard/look";
      const answer = await post(path, { ...this.asked, beam, ...(changes.length ? { changes } : {}) }, running.signal);
      this.notice.clear();
      this.receiveDocument(answer, isNew, answer.seconds ?? (performance.now() - started) / 1000);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.notice.show(error, error.kind === "other" || error.kind === "limit" ? null : again);
      if (error.kind === "other" && this.changes.length) this.withdraw();
    } finally {
      if (running === this.running) this.node.classList.remove("busy");
    }
  }

  /** A change that the server refused is taken back, so that the next one is not refused because of it. */
  withdraw() {
    this.changes.pop();
    this.positions.value = this.changes.find((one) => one.kind === "positions")?.value ?? "";
    this.drawChips();
  }

  receiveDocument(answer, isNew, seconds) {
    const { views } = answer.document;
    const isChanged = this.changes.length > 0 || this.beam.value !== "";
    if (isNew && !isChanged) this.before = views[0].output ?? "";
    this.hint.hidden = true;
    this.workbench.hidden = false;
    this.view = views[0];
    this.fillLayers(isNew);
    if (isNew) this.fillBeams();
    this.fillWords();
    this.drawOutputs(isChanged ? answer.after ?? views.at(-1).output ?? "" : null, seconds);
    if (isNew || !isChanged) this.hidePicked();
    else if (this.isPicked) this.showResult();
    this.isPicked = false;
    this.send({ type: "open", document: answer.document, blobs: answer.blobs, isNew });
    announce(isChanged ? `New output: ${answer.after ?? views.at(-1).output}` : "The model has been read.");
  }

  // ---- outputs side by side --------------------------------------------------------------------------------------------

  drawOutputs(after, seconds) {
    const [before, changed] = after === null ? [[[this.before, true]], null] : difference(this.before, after);
    const line = (parts) => parts.map(([text, same]) => (same ? text : element("mark", {}, text)));
    const box = (title, parts, more) => element("section", { class: "output" }, element("h3", {}, title),
      element("p", { dir: "auto", class: "written" }, line(parts)), more);
    this.changedLine = changed && line(changed);
    const boxes = [
      box("Unchanged", before),
      changed && box("Changed", changed, element("p", { class: "faint" },
        this.before === after ? "The output is the same." : "Words that differ are marked.", ` ${seconds.toFixed(2)} s`)),
    ];
    this.outputs.replaceChildren(...boxes.filter(Boolean));
    this.outputs.hidden = !this.before && !after; // a model that writes nothing
  }

  // ---- changes ---------------------------------------------------------------------------------------------------------

  add(kind, value, said) {
    if (kind === "positions") this.changes = this.changes.filter((one) => one.kind !== "positions");
    if (this.changes.some((one) => one.kind === kind && one.value === value)) return;
    this.changes.push({ kind, value, said });
    this.drawChips();
    this.ask(false);
  }

  remove(change) {
    this.changes = this.changes.filter((one) => one !== change);
    if (change.kind === "positions") this.positions.value = "";
    this.drawChips();
    this.ask(false);
  }

  removeAll() {
    this.changes = [];
    this.positions.value = this.beam.value = "";
    this.drawChips();
    this.ask(false);
  }

  drawChips() {
    const chip = (change) => element("li", { class: "chip" }, element("bdi", {}, `${change.kind} ${change.said}`),
      iconButton("close", `Undo: ${change.kind} ${change.said}`, () => this.remove(change)));
    const some = this.changes.length > 0;
    this.chips.replaceChildren(...this.changes.map(chip),
      ...(some ? [element("li", {}, button("Undo all", () => this.removeAll(), { class: "small" }))] : []));
  }

  changeHead(kind) {
    const head = this.head.value;
    const value = head === "" ? this.layer.value : `${this.layer.value}:${head}`;
    this.add(kind, value, value);
  }

  setPositions(name) {
    if (name) this.add("positions", name, name);
    else {
      this.changes = this.changes.filter((one) => one.kind !== "positions");
      this.drawChips();
      this.ask(false);
    }
  }

  changeLink(kind) {
    const [queries, keys] = [this.queries[this.query.value], this.keys[this.key.value]];
    if (!queries || !keys) return;
    this.addLink(kind, this.scope(), queries, keys);
  }

  /** Return the layer and head that links are changed in. */
  scope() {
    if (this.where.value === "head") return `${this.layer.value}${this.head.value === "" ? "" : `:${this.head.value}`}`;
    return this.hasCross() ? ALL_CROSS : this.layer.value.replace(/\d+/, "*");
  }

  addLink(kind, scope, query, key) {
    const value = `${scope}@${query.places.join(",")}>${key.places.join(",")}`;
    this.add(kind, value, `${query.label} → ${key.label}${scope === ALL_CROSS ? "" : ` in ${scope}`}`);
  }

  // ---- choices, from the document --------------------------------------------------------------------------------------

  hasCross() {
    return this.view.attention.some((one) => one.kind === "cross");
  }

  fillLayers(isNew) {
    const names = this.view.attention.map((one) => [one.name, one.name]);
    const cross = this.view.attention.filter((one) => one.kind === "cross").at(-1)?.name;
    fillSelect(this.layer, names, isNew ? cross ?? names.at(-1)?.[0] : this.layer.value);
    this.fillHeads();
  }

  fillHeads() {
    const heads = this.view?.attention.find((one) => one.name === this.layer.value)?.heads ?? 0;
    const one = (i) => [String(i), String(i)];
    fillSelect(this.head, [...Array.from({ length: heads }, (_, i) => one(i)), ["", "all"]], this.head.value || "0");
    if (this.where?.value === "head") this.fillWords();
  }

  fillBeams() {
    const model = this.models.find((one) => one.name === this.asked.model);
    const usual = ["", `as usual${model?.beam ? ` (${model.beam})` : ""}`];
    fillSelect(this.beam, [usual, ...BEAMS.map((n) => [String(n), String(n)])], "");
  }

  /** Offer the words that a link can join: those of the output and of the input, or those of the chosen layer's axes. */
  fillWords() {
    if (!this.view) return;
    const isMeant = this.where.value === "head"
      ? (one) => one.name === this.layer.value
      : (one) => one.kind === "cross" || !this.hasCross();
    const attention = this.view.attention.find(isMeant);
    if (!attention) return;
    const across = ["cross", "alignment"].includes(attention.kind);
    this.queries = wordsOf(this.view.strips[attention.queries], across ? -1 : 0);
    this.keys = wordsOf(this.view.strips[attention.keys], 0);
    const options = (words) => words.map((word, i) => [String(i), word.label]);
    fillSelect(this.query, options(this.queries), this.query.value);
    fillSelect(this.key, options(this.keys), this.key.value);
  }

  // ---- the frame -------------------------------------------------------------------------------------------------------

  /** Load the frame when it is first needed, and send it a message as soon as it is ready. */
  send(message) {
    if (this.isReady) {
      this.frame.contentWindow.postMessage(message, location.origin);
      return;
    }
    this.pending = message;
    if (!this.frame.src) this.frame.src = "/static/look.html";
  }

  sendTheme() {
    if (this.isReady) this.frame.contentWindow.postMessage({ type: "theme", theme: this.app.theme() }, location.origin);
  }

  receive({ data, origin, source }) {
    if (origin !== location.origin || source !== this.frame.contentWindow) return;
    if (data.type === "ready") {
      this.isReady = true;
      this.sendTheme();
      if (this.pending) this.send(this.pending);
      this.pending = null;
    } else if (data.type === "height") this.frame.style.height = `${data.height}px`;
    else if (data.type === "drawn") this.follow(data);
    else if (data.type === "picked") this.showPicked(data);
  }

  /** The head that the frame shows is the one to change. */
  follow({ layer, head }) {
    if (!layer || ![...this.layer.options].some((one) => one.value === layer)) return;
    this.layer.value = layer;
    this.head.value = head >= 0 ? String(head) : "";
    this.fillHeads();
    this.head.value = head >= 0 ? String(head) : "";
  }

  hidePicked() {
    this.picked.hidden = true;
  }

  /** Show what came of a change by a cell where the cell was clicked: the outputs may be above the window. */
  showResult() {
    const last = this.changes.at(-1);
    const undo = () => { this.hidePicked(); this.remove(last); };
    this.picked.replaceChildren(
      element("p", { class: "written", dir: "auto" }, this.changedLine),
      element("div", { class: "row" }, button("Undo", undo), iconButton("close", "Close", () => this.hidePicked())));
    this.picked.hidden = false;
  }

  /** Offer to change the link of a cell that was clicked in the frame. */
  showPicked({ layer, kind, head, query, key }) {
    const across = ["cross", "alignment"].includes(kind);
    const written = query.wrote ?? `after ${query.label}`; // a row of the decoder reads one token and writes the next
    const from = { label: across ? written : query.label, places: query.places };
    const own = head >= 0 ? `${layer}:${head}` : layer;
    const all = across ? ALL_CROSS : layer.replace(/\d+/, "*");
    const act = (label, change, scope, more = {}) => button(label, () => {
      this.isPicked = true;
      this.addLink(change, scope, from, key);
    }, more);
    this.picked.replaceChildren(
      element("p", {}, element("bdi", {}, from.label), " → ", element("bdi", {}, key.label),
        element("span", { class: "faint" }, ` ${own}`)),
      element("div", { class: "row" },
        act("Forbid this link everywhere", "forbid", all, { class: "strong" }),
        act(head >= 0 ? "only in this head" : "only in this layer", "forbid", own),
        act("Force it", "force", all), iconButton("close", "Close", () => this.hidePicked())));
    this.picked.hidden = false;
  }
}

/** Return the words of a token sequence with the rows that they stand for; in cross-attention a row writes the next token. */
function wordsOf(strip, shift) {
  const rows = (places) => places.map((place) => place + shift).filter((place) => place >= 0);
  const words = strip.words.map(([label, places]) => ({ label, places: rows(places) }));
  return words.filter((word) => word.places.length && word.places[0] < strip.ids.length);
}

/** Return two texts as parts [text, whether the other has it too], by the longest common subsequence of their words. */
export function difference(first, second) {
  const [a, b] = [first, second].map((text) => text.match(/\s+|[\p{Script=Han}]|[^\s\p{Script=Han}]+/gu) ?? []);
  const best = Array.from({ length: a.length + 1 }, () => new Uint32Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    }
  }
  const [left, right] = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      left.push([a[i++], true]);
      right.push([b[j++], true]);
    } else if (j >= b.length || (i < a.length && best[i + 1][j] >= best[i][j + 1])) left.push([a[i], !a[i++].trim()]);
    else right.push([b[j], !b[j++].trim()]);
  }
  return [left, right];
}
