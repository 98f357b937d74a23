/**
 * The Translate tab: two panes, translated while typing.
 *
 * The translation arrives sentence by sentence. A sentence keeps its place in the source, its words and the links between its
 * words and those of the source, with positions in the translation counted from its own beginning, because a sentence whose
 * end is replaced by an alternative moves all that follow.
 */

import {
  announce, button, capitalized, codePoint, debounced, directionControls, element, fillSelect, icon, iconButton, modelChoice,
  percent, select, store, stored, withoutDirectionControls, withoutOptions,
} from "./dom.js";
import { Files } from "./files.js";
import { History } from "./history.js";
import { openMenu } from "./menu.js";
import { Notice } from "./notice.js";
import { events, post } from "./service.js";
import { focusWord, makeReachable, moveByKeys, overlaps, wordNodes } from "./words.js";

const PAUSE = 300; // milliseconds without typing before a request
const LONG = 600; // characters of a text that is written smaller
const UNSURE = 0.3; // sentences of a lower confidence are marked
const FORMS = [["", "Formality"], ["formal", "Formal"], ["familiar", "Familiar"]];

export class TranslateTab {
  constructor(app, models) {
    this.app = app;
    this.models = models;
    this.model = models[0];
    this.sentences = [];
    this.wordOf = new WeakMap(); // element -> word
    this.running = null; // AbortController of the request that is under way
    this.shown = null; // {source, target} of the translation that is shown
    this.limit = app.limits.characters;
    this.notice = new Notice();
    this.schedule = debounced(() => this.translate(), PAUSE);
    this.remember = debounced(() => this.addToHistory(), 1500);
    this.build();
  }

  // ---- parts -----------------------------------------------------------------------------------------------------------

  build() {
    const [source, target] = [stored("localStorage", "regard.source") ?? "", stored("localStorage", "regard.target") ?? ""];
    this.source = select("Source language", [], "", (code) => this.chooseSource(code), { id: "source-language" });
    this.target = select("Target language", [], "", (code) => this.chooseTarget(code), { id: "target-language" });
    this.form = select("Form of address", FORMS, "", () => this.translate(), { class: "form" });
    this.fillLanguages(source, target);
    const model = modelChoice(this.models, (name) => this.chooseModel(name));
    this.text = element("textarea", {
      id: "source-text", "aria-label": "Text to translate", dir: "auto", spellcheck: "false", autocomplete: "off",
      placeholder: "Type or paste a text", oninput: () => this.typed(),
    });
    this.mirror = element("div", { class: "mirror", "aria-hidden": "true", dir: "auto" });
    this.rest = document.createTextNode(""); // what of the source has no translation yet
    this.output = element("div", {
      id: "translation", class: "translation", role: "group", dir: "auto",
      "aria-label": "Translation. Arrow keys move from word to word, Enter shows alternatives.",
    });
    this.counter = element("span", { class: "counter faint" });
    this.controls = element("p", { class: "invisible-note", hidden: true });
    this.clearButton = iconButton("close", "Clear the text", () => this.clear(), { class: "quiet round clear" });
    this.copyButton = iconButton("copy", "Copy the translation", () => this.copy(), { disabled: true });
    this.lookButton = button([icon("look"), "Look inside"], () => this.app.open("look"), { class: "quiet", disabled: true });
    this.stopButton = button([icon("stop"), "Stop"], () => this.stop(), { class: "small", hidden: true });
    this.confidence = element("span", { class: "faint", title: "How sure the model is, from 0 to 100 %" });
    this.notes = element("ul", { class: "notes" });
    this.progress = element("progress", { "aria-label": "Sentences translated", hidden: true });
    this.files = new Files(() => ({ source: this.source.value, target: this.fileTarget() }), this.app.fileFormats);
    this.history = new History((entry) => this.restore(entry));
    this.swapButton = iconButton("swap", "Swap the languages", () => this.swap(), { class: "quiet round swap" });
    this.panes = element("div", { class: "panes" },
      element("section", { class: "pane", "aria-label": "Source" },
        element("div", { class: "pane-head" }, this.source, this.swapButton),
        element("div", { class: "editor" }, this.mirror, this.text, this.clearButton),
        element("div", { class: "pane-foot" }, this.counter, this.controls)),
      element("section", { class: "pane target", "aria-label": "Translation" },
        element("div", { class: "pane-head" }, this.target, this.form), this.progress,
        this.output, this.notes,
        element("div", { class: "pane-foot" }, this.confidence, this.stopButton, element("span", { class: "space" }),
          this.lookButton, this.copyButton)));
    const drop = element("p", { class: "drop-hint", "aria-hidden": "true" }, "Drop files to translate them");
    this.node = element("div", { class: "translate" }, element("div", { class: "model-line" }, model.node),
      this.notice.node, this.panes, this.files.node, this.history.node, drop);
    this.files.acceptDrops(this.node);
    this.addListeners();
    this.showForm();
    this.typed(false);
  }

  addListeners() {
    const wordAt = (event) => this.wordOf.get(event.target.closest?.(".word"));
    this.output.addEventListener("mouseover", (event) => {
      const word = wordAt(event);
      if (word) this.lightTarget(word);
      else this.unlight();
    });
    this.output.addEventListener("mouseleave", () => this.unlight());
    this.output.addEventListener("focusin", (event) => {
      const word = wordAt(event);
      if (word) this.lightTarget(word);
    });
    this.output.addEventListener("focusout", () => this.unlight());
    this.output.addEventListener("click", (event) => {
      const word = wordAt(event);
      if (word && getSelection().isCollapsed) this.showAlternatives(word);
    });
    moveByKeys(this.output, () => this.words(), (word) => this.showAlternatives(word));
    this.text.addEventListener("mousemove", ({ clientX, clientY }) => {
      // The words of the source lie behind the text field, which has no words of its own.
      const under = document.elementsFromPoint(clientX, clientY);
      const node = under.find((one) => one.parentNode === this.mirror && one.matches(".word"));
      if (node) this.lightSource(this.wordOf.get(node));
      else this.unlight();
    });
    this.text.addEventListener("mouseleave", () => this.unlight());
    document.addEventListener("selectionchange", () => {
      if (document.activeElement !== this.text || !this.sentences.length) return;
      const at = this.text.selectionStart;
      const word = this.sourceWords().find(({ begin, end }) => begin <= at && at <= end);
      if (word) this.lightSource(word);
      else this.unlight();
    });
  }

  // ---- languages -------------------------------------------------------------------------------------------------------

  name(code) {
    return capitalized(this.model.languages?.find((one) => one.code === code)?.name ?? code ?? "");
  }

  fillLanguages(source, target) {
    const codes = (side) => new Set((this.model.directions ?? []).map((one) => one.split(">")[side]));
    const options = (side) => {
      const known = codes(side);
      const own = (this.model.languages ?? []).filter((one) => !known.size || known.has(one.code));
      return own.map((one) => [one.code, capitalized(one.name)]);
    };
    fillSelect(this.source, [["", "Detect language"], ...options(0)], source);
    fillSelect(this.target, [["", "Automatic"], ...options(1)], target);
  }

  chooseModel(name) {
    this.model = this.models.find((one) => one.name === name);
    this.fillLanguages(this.source.value, this.target.value);
    this.showForm();
    this.translate();
  }

  chooseSource(code) {
    store("localStorage", "regard.source", code || null);
    if (code && code === this.target.value) this.target.value = "";
    this.showDetected(null);
    this.translate();
  }

  chooseTarget(code) {
    store("localStorage", "regard.target", code || null);
    if (code && code === this.source.value) this.source.value = "";
    this.showForm();
    this.translate();
  }

  /** Write what was detected into the option for it, so that it stands where the language is chosen. */
  showDetected(begun) {
    const found = begun?.source || begun?.detected?.language;
    const sure = begun?.detected?.certain !== false;
    this.source.options[0].textContent = found ? `${this.name(found)}${sure ? "" : "?"} (detected)` : "Detect language";
    this.source.title = found && !sure ? `Probably ${this.name(found)}; choose the language if it is another` : "";
    const isAutomatic = begun?.target && !this.target.value;
    this.target.options[0].textContent = isAutomatic ? `${this.name(begun.target)} (automatic)` : "Automatic";
  }

  /** Show the choice of a form of address where the model has one for the target language. */
  showForm() {
    const target = this.target.value || this.shown?.target;
    const forms = this.model.formality?.[target] ?? [];
    this.form.hidden = forms.length < 2;
  }

  formality() {
    return this.form.hidden ? undefined : this.form.value || undefined;
  }

  swap() {
    const target = this.target.value || this.shown?.target || "";
    const source = this.source.value || this.shown?.source || "";
    const translation = this.translation();
    this.source.value = [...this.source.options].some((one) => one.value === target) ? target : "";
    this.target.value = [...this.target.options].some((one) => one.value === source) ? source : "";
    if (translation) this.text.value = translation;
    this.typed(false);
    this.translate();
  }

  fileTarget() {
    const source = this.source.value || "en";
    const others = [...this.target.options].map((one) => one.value).filter((code) => code && code !== source);
    return this.target.value || this.shown?.target || others[0];
  }

  // ---- text ------------------------------------------------------------------------------------------------------------

  typed(wait = true) {
    const text = this.text.value;
    this.rest.data = `${text}\u200b`; // a line of its own after a final line break
    this.mirror.replaceChildren(this.rest);
    this.clearButton.hidden = !text;
    this.panes.classList.toggle("long", text.length > LONG);
    const limit = this.limit > 0 ? ` / ${this.limit.toLocaleString("en")}` : "";
    this.counter.textContent = text || limit ? `${text.length.toLocaleString("en")}${limit}` : "";
    this.counter.classList.toggle("over", this.limit > 0 && text.length > this.limit);
    this.counter.title = "Characters";
    this.noteControls(text);
    this.forgetSourceWords();
    if (!wait) return;
    this.running?.abort();
    this.output.classList.toggle("old", this.sentences.length > 0);
    if (text.trim()) this.schedule();
    else this.translate();
  }

  /** Direction controls make a text look other than it is: say that it has some. */
  noteControls(text) {
    const found = directionControls(text);
    this.controls.hidden = !found.length;
    if (!found.length) return;
    const kinds = [...new Set(found)].map(codePoint).join(", ");
    this.controls.replaceChildren(`Invisible direction controls: ${kinds}`, button("Remove", () => {
      this.text.value = withoutDirectionControls(this.text.value);
      this.typed();
    }, { class: "small" }));
  }

  clear() {
    this.text.value = "";
    this.typed();
    this.text.focus();
  }

  restore({ text, source, target }) {
    this.text.value = text;
    if ([...this.target.options].some((one) => one.value === target)) this.target.value = target;
    if (this.source.value && this.source.value !== source) this.source.value = "";
    this.showForm();
    this.typed(false);
    this.translate();
    this.text.focus();
  }

  addToHistory() {
    const text = this.text.value.trim();
    if (this.shown?.source && text) this.history.add({ text, translation: this.translation().trim(), ...this.shown });
  }

  // ---- request ---------------------------------------------------------------------------------------------------------

  async translate() {
    this.schedule.cancel();
    this.remember.cancel();
    this.running?.abort();
    this.notice.hide();
    const text = this.text.value;
    if (!text.trim()) {
      this.reset();
      this.showDetected(null);
      return;
    }
    this.typed(false);
    const running = new AbortController();
    this.running = running;
    const asked = {
      text, stream: true, model: this.model.name, source: this.source.value || undefined, to: this.target.value || undefined,
      formality: this.formality(),
    };
    try {
      await this.receive(asked, running.signal);
      this.notice.clear();
    } catch (error) {
      if (error.name === "AbortError" || running !== this.running) return;
      this.notice.show(error, () => this.translate());
    } finally {
      if (running === this.running) this.settle();
    }
  }

  async receive(asked, signal) {
    let begun = null;
    let first = true;
    for await (const { event, data } of events("/regard/translate", asked, signal)) {
      if (signal.aborted) return;
      if (event === "begin") {
        begun = data;
        this.showBegin(begun);
      } else if (event === "sentence") {
        if (first) this.reset();
        first = false;
        this.addSentence(data, begun);
        this.showProgress(this.sentences.length, begun?.count ?? 0);
      } else if (event === "end") {
        if (first) this.reset();
        this.finish(data);
      }
    }
  }

  showBegin(begun) {
    this.shown = { source: begun.source, target: begun.target };
    this.showDetected(this.source.value ? { target: begun.target } : begun);
    this.showForm();
    this.output.lang = begun.target ?? "";
    this.text.lang = begun.source ?? "";
    this.showProgress(0, begun.count);
  }

  showProgress(done, count) {
    const long = count > 3 && done < count;
    this.progress.hidden = !long;
    this.stopButton.hidden = !long;
    this.progress.max = Math.max(1, count);
    this.progress.value = done;
    if (long) this.confidence.textContent = `${done} of ${count} sentences`;
  }

  finish(end) {
    const rest = end.text?.startsWith(this.translation()) ? end.text.slice(this.translation().length) : "";
    const whole = { begin: 0, end: this.text.value.length };
    if (rest && !this.sentences.length) this.addSentence({ text: rest, source: whole });
    this.shown = { source: end.source ?? this.shown?.source, target: end.target ?? this.shown?.target };
    const known = typeof end.confidence === "number";
    this.confidence.textContent = known ? `Confidence ${percent(end.confidence)}` : "";
    this.showNotes(end);
    const sentences = this.sentences.map(({ source }) => ({ text: this.text.value.slice(source.begin, source.end) }));
    this.app.translated = { model: this.model.name, ...this.shown, sentences };
    announce(`Translated into ${this.name(this.shown.target)}.`);
    this.remember();
  }

  showNotes(end) {
    const all = [
      end.via && `Translated by way of ${this.name(end.via)}.`,
      ...[...(end.notes ?? []), ...this.sentences.flatMap((one) => one.notes)].map(withoutOptions),
      this.sentences.some((one) => one.unsure) && "Sentences with a dotted line are uncertain.",
    ];
    this.notes.replaceChildren(...[...new Set(all.filter(Boolean))].map((note) => element("li", {}, note)));
  }

  settle() {
    this.running = null;
    this.output.classList.remove("old");
    this.progress.hidden = true;
    this.stopButton.hidden = true;
  }

  stop() {
    this.running?.abort();
    this.settle();
    this.confidence.textContent = "Stopped";
  }

  reset() {
    this.sentences = [];
    this.forgetSourceWords();
    this.output.replaceChildren();
    this.output.classList.remove("old");
    this.notes.replaceChildren();
    this.confidence.textContent = "";
    this.copyButton.disabled = this.lookButton.disabled = true;
  }

  // ---- sentences and words ---------------------------------------------------------------------------------------------

  translation() {
    return this.sentences.map((one) => one.before + one.text).join("");
  }

  words() {
    return this.sentences.flatMap((one) => one.words);
  }

  sourceWords() {
    return this.sentences.flatMap((one) => one.sourceWords);
  }

  forgetSourceWords() {
    for (const one of this.sentences) one.sourceWords = [];
  }

  addSentence(given, begun = null) {
    const { begin, end } = given.source ?? { begin: 0, end: 0 };
    const offset = given.target?.begin ?? 0;
    const sentence = {
      text: given.text, before: given.before ?? (this.sentences.length ? " " : ""), source: { begin, end },
      confidence: given.confidence, notes: given.notes ?? [], unsure: given.confidence < UNSURE,
      links: (given.alignment ?? []).map(([a, b, c, d]) => [a, b, c - offset, d - offset]),
      node: element("span", { class: "sentence" }), words: [], sourceWords: [],
    };
    this.sentences.push(sentence);
    this.output.append(document.createTextNode(sentence.before), sentence.node);
    this.drawSentence(sentence);
    this.drawSource(sentence, begun?.source);
    if (this.sentences.length === 1 && sentence.words.length) makeReachable([], sentence.words[0]);
    this.copyButton.disabled = this.lookButton.disabled = false;
  }

  drawSentence(sentence) {
    const { nodes, words } = wordNodes(sentence.text, this.shown?.target);
    sentence.words = words.map((word) => ({ ...word, sentence }));
    for (const word of sentence.words) this.wordOf.set(word.node, word);
    sentence.node.replaceChildren(...nodes);
    sentence.node.classList.toggle("unsure", sentence.unsure);
    sentence.node.title = sentence.unsure ? `Confidence ${percent(sentence.confidence)}` : "";
  }

  /** Put the words of a sentence of the source behind the text field, in the place of the plain text there. */
  drawSource(sentence, language) {
    const done = this.text.value.length - (this.rest.data.length - 1);
    const { begin, end } = sentence.source;
    if (begin < done || end <= begin) return;
    const { nodes, words } = wordNodes(this.text.value.slice(begin, end), language, true);
    sentence.sourceWords = words.map((word) => ({ ...word, sentence, begin: word.begin + begin, end: word.end + begin }));
    for (const word of sentence.sourceWords) this.wordOf.set(word.node, word);
    this.rest.before(document.createTextNode(this.text.value.slice(done, begin)), ...nodes);
    this.rest.data = `${this.text.value.slice(end)}\u200b`;
  }

  // ---- alignment -------------------------------------------------------------------------------------------------------

  unlight() {
    for (const node of this.lit ?? []) node.classList.remove("lit", "current");
    this.lit = [];
  }

  lightTarget(word) {
    this.light(word, word.sentence.links.filter(([, , from, to]) => overlaps(word.begin, word.end, from, to)));
  }

  lightSource(word) {
    if (word) this.light(word, word.sentence.links.filter(([from, to]) => overlaps(word.begin, word.end, from, to)));
  }

  light(word, links) {
    this.unlight();
    const { words, sourceWords } = word.sentence;
    const sources = sourceWords.filter((one) => links.some(([from, to]) => overlaps(one.begin, one.end, from, to)));
    const targets = words.filter((one) => links.some(([, , from, to]) => overlaps(one.begin, one.end, from, to)));
    this.lit = [...sources, ...targets].map((one) => one.node);
    for (const node of this.lit) node.classList.add("lit");
    word.node.classList.add("current");
    this.lit.push(word.node);
  }

  // ---- alternatives ----------------------------------------------------------------------------------------------------

  async showAlternatives(word) {
    const { sentence } = word;
    makeReachable(this.words(), word);
    const asking = new AbortController();
    const menu = openMenu(word.node, `Alternatives for ${word.text}`, () => asking.abort());
    const prefix = sentence.text.slice(0, word.begin);
    const asked = {
      text: this.text.value.slice(sentence.source.begin, sentence.source.end), prefix, to: this.shown.target,
      source: this.shown.source || undefined, model: this.model.name, n: 6,
      formality: this.formality(),
    };
    try {
      const { alternatives } = await post("/regard/alternatives", asked, asking.signal);
      if (!alternatives?.length) menu.say("There are no alternatives here.");
      else menu.fill(alternatives.map((one) => this.item(one, word, prefix)));
    } catch (error) {
      if (error.name !== "AbortError") menu.say(error.message);
    }
  }

  item(alternative, word, prefix) {
    const { next, text, probability } = alternative;
    const after = text.startsWith(prefix) ? text.slice(prefix.length).trimStart() : text;
    const rest = after.startsWith(next.trim()) ? after.slice(next.trim().length) : after;
    return {
      current: next.trim() === word.text,
      choose: () => this.replaceRest(word, alternative, prefix),
      nodes: [
        element("bdi", { class: "next", dir: "auto" }, next.trim() || "(end of the sentence)"),
        element("span", { class: "probability" }, percent(probability)),
        element("bdi", { class: "after", dir: "auto" }, rest.trim()),
      ],
    };
  }

  /** Take an alternative: the sentence ends with it. Links of what stands before it stay true. */
  replaceRest(word, alternative, prefix) {
    const { sentence } = word;
    sentence.text = alternative.text;
    sentence.links = alternative.alignment
      ? alternative.alignment.map(([a, b, c, d]) => [a + sentence.source.begin, b + sentence.source.begin, c, d])
      : sentence.links.filter(([, , , end]) => end <= prefix.length);
    sentence.unsure = false;
    this.drawSentence(sentence);
    const own = sentence.words.find((one) => one.begin >= word.begin) ?? sentence.words.at(-1);
    if (own) focusWord(this.words(), own);
    announce(`Now: ${sentence.text}`);
    this.remember();
  }

  // ---- copying ---------------------------------------------------------------------------------------------------------

  async copy() {
    const text = this.translation();
    try {
      await navigator.clipboard.writeText(text);
    } catch { // without TLS there is no clipboard, but the old command works
      const field = element("textarea", { class: "unseen" });
      field.value = text;
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
      this.copyButton.focus();
    }
    this.copyButton.replaceChildren(icon("done"));
    announce("Copied.");
    setTimeout(() => this.copyButton.replaceChildren(icon("copy")), 1500);
  }

  focus() {
    this.text.focus();
  }
}
