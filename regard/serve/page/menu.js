/** A menu beside a word: arrow keys move, Enter chooses, Escape closes it and gives the focus back. */

import { element } from "./dom.js";

let opened = null;

/** Open a menu at an element and return {fill(items), say(text), close()}; an item is {nodes, choose, current}. */
export function openMenu(anchor, label, onclose = () => {}) {
  opened?.close(false);
  const box = element("div", { class: "menu", role: "menu", "aria-label": label, tabindex: "-1" });
  const menu = { fill, say, close, get isOpen() { return box.isConnected; } };

  function fill(items) {
    box.replaceChildren(...items.map((item) => {
      const chosen = () => { close(true); item.choose(); };
      return element("button", {
        type: "button", role: "menuitem", tabindex: "-1", class: "menu-item", "aria-current": item.current && "true",
        onclick: chosen,
      }, item.nodes);
    }));
    place();
    box.firstElementChild?.focus();
  }

  function say(text) {
    box.replaceChildren(element("p", { class: "menu-text" }, text));
    place();
  }

  function close(refocus = true) {
    if (!box.isConnected) return;
    box.remove();
    opened = null;
    document.removeEventListener("pointerdown", outside, true);
    anchor.classList.remove("chosen");
    if (refocus && anchor.isConnected) anchor.focus();
    onclose();
  }

  function outside(event) {
    if (!box.contains(event.target)) close(false);
  }

  /** Put the menu under the anchor, or above it where there is no room, inside the window. */
  function place() {
    const { left, bottom, top } = anchor.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    const under = bottom + box.offsetHeight + 8 <= innerHeight || top < box.offsetHeight + 8;
    box.style.left = `${scrollX + Math.max(8, Math.min(left, wide - box.offsetWidth - 8))}px`;
    box.style.top = `${scrollY + (under ? bottom + 4 : top - box.offsetHeight - 4)}px`;
  }

  box.addEventListener("keydown", (event) => {
    const items = [...box.querySelectorAll("[role=menuitem]")];
    const at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (to !== undefined && items.length) items[(to + items.length) % items.length].focus();
    else if (event.key === "Escape" || event.key === "Tab") close(true);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  anchor.classList.add("chosen");
  document.body.append(box);
  document.addEventListener("pointerdown", outside, true);
  opened = menu;
  say("Asking the model …");
  box.focus();
  return menu;
}
