/** The Vectors tab: the nearest words where word vectors are served, the most similar texts where a model embeds texts. */

import { announce, bar, button, debounced, element, modelChoice } from "./dom.js";
import { Notice } from "./notice.js";
import { post } from "./service.js";

export class VectorsTab {
  constructor(app, models) {
    this.models = models;
    this.notice = new Notice();
    this.later = debounced(() => this.ask(), 300);
    const model = modelChoice(models, () => this.choose());
    this.model = model.box;
    const oninput = () => this.later();
    this.word = element("input", {
      type: "text", class: "boxed", dir: "auto", autocomplete: "off", spellcheck: "false", oninput,
    });
    this.wordField = element("label", { class: "field wide" }, element("span", {}), this.word);
    this.texts = element("textarea", {
      rows: "6", class: "boxed", dir: "auto", placeholder: "One text on each line", oninput,
    });
    const hint = element("span", {}, "Compared with these texts, one on each line");
    this.textsField = element("label", { class: "field wide" }, hint, this.texts);
    this.list = element("ol", { class: "bars", "aria-label": "Neighbours" });
    this.node = element("div", { class: "vectors" }, this.notice.node, model.node, this.wordField, this.textsField,
      this.list);
    this.choose();
  }

  get embedsTexts() {
    return this.models.find((one) => one.name === this.model.value).task === "embedding";
  }

  choose() {
    this.textsField.hidden = !this.embedsTexts;
    this.wordField.firstChild.textContent = this.embedsTexts ? "Text" : "Word";
    this.word.placeholder = this.embedsTexts ? "A text" : "A word";
    this.ask();
  }

  async ask() {
    this.later.cancel();
    this.running?.abort();
    const word = this.word.value.trim();
    const texts = this.texts.value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (!word || (this.embedsTexts && !texts.length)) {
      this.list.replaceChildren();
      return;
    }
    const running = new AbortController();
    this.running = running;
    try {
      const { signal } = running;
      const found = await (this.embedsTexts ? this.similar(word, texts, signal) : this.nearest(word, signal));
      this.notice.clear();
      this.draw(found);
    } catch (error) {
      if (error.name !== "AbortError") this.notice.show(error, () => this.ask());
    }
  }

  async nearest(word, signal) {
    const { neighbours } = await post("/regard/neighbours", { word, model: this.model.value, n: 15 }, signal);
    return neighbours;
  }

  /** Return the texts by the cosine of their vectors and that of the first. */
  async similar(text, texts, signal) {
    const { data } = await post("/v1/embeddings", { model: this.model.value, input: [text, ...texts] }, signal);
    const [first, ...others] = data.map((one) => one.embedding);
    const found = others.map((vector, i) => ({ word: texts[i], similarity: cosine(first, vector) }));
    return found.sort((a, b) => b.similarity - a.similarity);
  }

  draw(found) {
    this.list.replaceChildren(...found.map(({ word, similarity }) => {
      const name = element("bdi", { dir: "auto" }, word);
      const follow = () => { this.word.value = word; this.ask(); };
      const label = this.embedsTexts ? name : button(name, follow, { class: "quiet" });
      return element("li", {}, label, bar(similarity, similarity.toFixed(3)));
    }));
    announce(`${found.length} neighbours.`);
  }

  focus() {
    this.word.focus();
  }
}

function cosine(a, b) {
  const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
  return dot(a, b) / (Math.sqrt(dot(a, a) * dot(b, b)) || 1);
}
