/**
 * The line in a tab that says what went wrong and what happens next.
 *
 * A server that is busy is asked again after the time that it names, five times at most; one that is gone is asked again
 * when it answers.
 */

import { button, element, icon } from "./dom.js";
import { awaitServer } from "./service.js";

const MOST_RETRIES = 5;

export class Notice {
  constructor() {
    this.node = element("div", { class: "notice inline", role: "alert", hidden: true });
    this.retries = 0;
    this.waiting = new AbortController();
  }

  /** The request succeeded: forget earlier errors. */
  clear() {
    this.retries = 0;
    this.hide();
  }

  hide() {
    this.waiting.abort();
    this.waiting = new AbortController();
    clearInterval(this.clock);
    this.node.hidden = true;
  }

  /** Show an error; `retry` does the same request again. */
  show(error, retry = null) {
    this.hide();
    this.node.dataset.kind = error.kind ?? "other";
    if (error.kind === undefined) console.error(error);
    if (error.kind === "offline") this.showOffline(error, retry);
    else if (error.kind === "busy" && retry) this.showBusy(error, retry);
    else if (error.kind === "key") this.write(error.message, "Enter a key at the top of the page.");
    else if (error.kind === "limit") this.write(error.message, limits(error));
    else this.write(error.message || "Something went wrong.", retry && button("Try again", retry));
  }

  write(...parts) {
    this.node.replaceChildren(...parts.filter(Boolean).map((part) => (part.nodeType ? part : element("span", {}, part))),
      button(icon("close"), () => this.hide(), { class: "quiet round", "aria-label": "Hide this message" }));
    this.node.hidden = false;
  }

  async showOffline(error, retry) {
    const waiting = this.waiting.signal;
    this.write(error.message, "Your text is kept here; the page tries again by itself.", retry && button("Try now", retry));
    if (retry && await awaitServer(waiting)) retry();
  }

  showBusy(error, retry) {
    if (this.retries >= MOST_RETRIES) {
      this.retries = 0;
      this.write(error.message, button("Try again", retry));
      return;
    }
    let left = Math.ceil(error.retryAfter || 2 ** this.retries);
    this.retries += 1;
    const said = element("span", {}, `Trying again in ${left} s.`);
    this.write(error.message, said, button("Try now", retry));
    this.clock = setInterval(() => {
      left -= 1;
      said.textContent = `Trying again in ${left} s.`;
      if (left <= 0) {
        clearInterval(this.clock);
        retry();
      }
    }, 1000);
  }
}

function limits({ limit, value, message }) {
  if (limit === undefined || [String(limit), limit.toLocaleString("en")].some((said) => message.includes(said))) return "";
  return `Limit ${limit.toLocaleString("en")}${value === undefined ? "" : `, this is ${value.toLocaleString("en")}`}.`;
}
