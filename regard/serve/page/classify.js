/** The Classify tab: the probability of each label of a text, while typing, or of an image. */

import { announce, bar, debounced, element, modelChoice, percent } from "./dom.js";
import { Notice } from "./notice.js";
import { post } from "./service.js";

export class ClassifyTab {
  constructor(app, models) {
    this.models = models;
    this.notice = new Notice();
    this.later = debounced(() => this.classify(), 300);
    const model = modelChoice(models, () => this.choose());
    this.model = model.box;
    this.text = element("textarea", {
      rows: "5", class: "boxed", dir: "auto", "aria-label": "Text to classify", placeholder: "Type or paste a text",
      oninput: () => this.later(),
    });
    this.image = element("input", {
      type: "file", accept: "image/*", "aria-label": "Image to classify", onchange: () => this.readImage(),
    });
    this.picture = element("img", { class: "picture", alt: "The image that is classified", hidden: true });
    this.list = element("ol", { class: "bars", "aria-label": "Labels" });
    this.node = element("div", { class: "classify" }, this.notice.node, model.node, this.text, this.image, this.picture,
      this.list);
    this.choose();
  }

  get readsImages() {
    return this.models.find((one) => one.name === this.model.value).task === "images";
  }

  choose() {
    this.text.hidden = this.readsImages;
    this.image.hidden = !this.readsImages;
    this.picture.hidden = !this.readsImages || !this.picture.src;
    this.classify();
  }

  readImage() {
    const [file] = this.image.files;
    if (!file) return;
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      this.picture.src = reader.result;
      this.picture.hidden = false;
      this.classify();
    });
    reader.readAsDataURL(file);
  }

  async classify() {
    this.later.cancel();
    this.running?.abort();
    const text = this.readsImages ? this.picture.src : this.text.value;
    if (!text.trim()) {
      this.list.replaceChildren();
      return;
    }
    const running = new AbortController();
    this.running = running;
    try {
      this.draw(await post("/regard/classify", { text, model: this.model.value }, running.signal));
      this.notice.clear();
    } catch (error) {
      if (error.name !== "AbortError") this.notice.show(error, () => this.classify());
    }
  }

  /** Draw the labels of the text, the label of each word, or a number, whichever the model predicts. */
  draw({ classes = [], value = null, tags = [] }) {
    const best = [...classes].sort((a, b) => b.probability - a.probability);
    const row = (name, shown, more = {}) => element("li", more, element("bdi", { dir: "auto" }, String(name)), shown);
    const labels = best.map(({ label, probability: p }, i) => row(label, bar(p, percent(p)), { class: i ? "" : "best" }));
    const numbers = value === null ? [] : [row("Value", element("span", {}, String(value)), { class: "best" })];
    const words = tags.map(([word, label]) => row(word, element("span", {}, String(label))));
    this.list.replaceChildren(...labels, ...numbers, ...words);
    if (best.length) announce(`${best[0].label}, ${percent(best[0].probability)}`);
  }

  focus() {
    (this.readsImages ? this.image : this.text).focus();
  }
}
