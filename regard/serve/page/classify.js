/** The Classify tab: the probability of each label of a text, while typing. */

import { announce, bar, debounced, element, field, percent, select } from "./dom.js";
import { Notice } from "./notice.js";
import { post } from "./service.js";

export class ClassifyTab {
  constructor(app, models) {
    this.notice = new Notice();
    this.later = debounced(() => this.classify(), 300);
    this.model = select("Model", models.map((one) => [one.name, one.name]), models[0].name, () => this.classify());
    const modelField = field("Model", this.model);
    modelField.hidden = models.length < 2;
    this.text = element("textarea", {
      rows: "5", class: "boxed", dir: "auto", "aria-label": "Text to classify", placeholder: "Type or paste a text",
      oninput: () => this.later(),
    });
    this.list = element("ol", { class: "bars", "aria-label": "Labels" });
    this.node = element("div", { class: "classify" }, this.notice.node, modelField, this.text, this.list);
  }

  async classify() {
    this.later.cancel();
    this.running?.abort();
    const text = this.text.value;
    if (!text.trim()) {
      this.list.replaceChildren();
      return;
    }
    const running = new AbortController();
    this.running = running;
    try {
      const { labels } = await post("/regard/classify", { text, model: this.model.value }, running.signal);
      this.notice.clear();
      const best = [...labels].sort((a, b) => b.probability - a.probability);
      this.list.replaceChildren(...best.map(({ label, probability }, i) => element("li", { class: i ? "" : "best" },
        element("bdi", { dir: "auto" }, String(label)), bar(probability, percent(probability)))));
      announce(`${best[0].label}, ${percent(best[0].probability)}`);
    } catch (error) {
      if (error.name !== "AbortError") this.notice.show(error, () => this.classify());
    }
  }

  focus() {
    this.text.focus();
  }
}
