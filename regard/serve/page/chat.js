/** The Chat tab: a conversation, streamed. It is kept in this tab alone and forgotten when the tab is closed. */

import { announce, button, element, icon, modelChoice, visibleNodes } from "./dom.js";
import { Notice } from "./notice.js";
import { TokenText, receiveTokens, samplingSettings } from "./tokens.js";

export class ChatTab {
  constructor(app, models) {
    this.messages = []; // {role, content} with, for answers, the text that is shown
    this.notice = new Notice();
    const model = modelChoice(models);
    this.model = model.box;
    this.settings = samplingSettings(200, app.limits.tokens);
    this.list = element("ol", { class: "messages", "aria-label": "Conversation" });
    this.empty = element("p", { class: "empty faint" },
      "Ask something. Answers show how likely each token was; click one for others.");
    this.input = element("textarea", {
      rows: "2", class: "boxed", dir: "auto", "aria-label": "Message", placeholder: "Message",
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.say();
    });
    this.stop = button([icon("stop"), "Stop"], () => this.running?.abort(), { hidden: true });
    const send = button("Send", () => this.say(), { class: "strong" });
    const fresh = button("New conversation", () => this.reset());
    const tools = element("div", { class: "row spread" }, model.node, this.settings.node, fresh, this.stop, send);
    this.node = element("div", { class: "chat" }, this.notice.node, this.empty, this.list,
      element("div", { class: "composer" }, this.input, tools));
  }

  say() {
    const content = this.input.value.trim();
    if (!content) return;
    this.input.value = "";
    this.empty.hidden = true;
    this.messages.push({ role: "user", content });
    this.list.append(element("li", { class: "message user" }, element("p", { dir: "auto" }, visibleNodes(content))));
    const place = this.messages.length;
    const shown = new TokenText((before, candidate) => this.answerAgain(place, before + candidate.text));
    const answer = { role: "assistant", shown };
    answer.row = element("li", { class: "message assistant" }, answer.shown.node);
    this.messages.push(answer);
    this.list.append(answer.row);
    this.answer(place);
  }

  /** Forget what was said after an answer, and let the answer continue from a chosen beginning. */
  answerAgain(place, prefix) {
    for (const one of this.messages.splice(place + 1)) one.row?.remove();
    while (this.list.children.length > place + 1) this.list.lastChild.remove();
    this.answer(place, prefix);
  }

  async answer(place, prefix = "") {
    this.running?.abort();
    const running = new AbortController();
    this.running = running;
    this.notice.hide();
    this.stop.hidden = false;
    const { shown } = this.messages[place];
    shown.begin(prefix, false);
    const earlier = this.messages.slice(0, place);
    const messages = earlier.map((one) => ({ role: one.role, content: one.content ?? one.shown.text }));
    const asked = { messages, prefix: prefix || undefined, model: this.model.value, ...this.settings.values() };
    try {
      await receiveTokens(asked, shown, running.signal);
      this.notice.clear();
      announce(shown.text);
    } catch (error) {
      if (error.name !== "AbortError") this.notice.show(error, () => this.answer(place, prefix));
    } finally {
      if (running === this.running) this.stop.hidden = true;
    }
  }

  reset() {
    this.running?.abort();
    this.messages = [];
    this.list.replaceChildren();
    this.empty.hidden = false;
    this.input.focus();
  }

  focus() {
    this.input.focus();
  }
}
