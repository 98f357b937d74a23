/** The Write tab: a language model continues a text; another candidate for a token continues it differently. */

import { announce, button, element, icon, modelChoice } from "./dom.js";
import { Notice } from "./notice.js";
import { TokenText, receiveTokens, samplingSettings } from "./tokens.js";

export class WriteTab {
  constructor(app, models) {
    this.notice = new Notice();
    const model = modelChoice(models);
    this.model = model.box;
    this.prompt = element("textarea", {
      "aria-label": "Beginning of the text", dir: "auto", rows: "4", class: "boxed",
      placeholder: "Write the beginning of a text",
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.write(this.prompt.value);
    });
    this.settings = samplingSettings(100, app.limits.tokens);
    this.go = button("Continue the text", () => this.write(this.prompt.value), { class: "strong" });
    this.stop = button([icon("stop"), "Stop"], () => this.running?.abort(), { hidden: true });
    this.take = button("Edit as the beginning", () => this.edit(), { class: "small", hidden: true });
    this.output = new TokenText((before, candidate) => this.write(before + candidate.text, false));
    this.hint = element("p", { class: "faint", hidden: true },
      "The deeper the colour, the less likely the token was. Click one for other candidates.");
    this.card = element("section", { class: "card", "aria-label": "Generated text", hidden: true },
      this.output.node, this.hint, this.take);
    this.node = element("div", { class: "write" }, this.notice.node, this.prompt,
      element("div", { class: "row spread" }, model.node, this.settings.node, this.stop, this.go), this.card);
  }

  async write(text, isPrompt = true) {
    if (!text.trim()) return;
    this.running?.abort();
    const running = new AbortController();
    this.running = running;
    this.notice.hide();
    this.card.hidden = false;
    this.stop.hidden = false;
    this.hint.hidden = this.take.hidden = true;
    this.output.begin(text, isPrompt);
    try {
      await receiveTokens({ prompt: text, model: this.model.value, ...this.settings.values() }, this.output, running.signal);
      this.notice.clear();
      announce("The text is written.");
    } catch (error) {
      if (error.name !== "AbortError") this.notice.show(error, () => this.write(text, isPrompt));
    } finally {
      if (running === this.running) this.stop.hidden = true;
      this.hint.hidden = this.take.hidden = !this.output.tokens.length;
    }
  }

  edit() {
    this.running?.abort();
    this.prompt.value = this.output.text;
    this.card.hidden = true;
    this.prompt.focus();
  }

  focus() {
    this.prompt.focus();
  }
}
