/** The page: asks which models are served, shows a tab for each thing they can do, and keeps colours and the API key. */

import { ChatTab } from "./chat.js";
import { ClassifyTab } from "./classify.js";
import { announce, element, icon, store } from "./dom.js";
import { LookTab } from "./look.js";
import { Notice } from "./notice.js";
import { get, hasKey, setKey } from "./service.js";
import { TranslateTab } from "./translate.js";
import { VectorsTab } from "./vectors.js";
import { WriteTab } from "./write.js";

const TABS = { // name, the models that it is for, its class
  translate: ["Translate", (model) => model.task === "translation", TranslateTab],
  look: ["Look", (model) => ["translation", "generation", "classification", "embedding"].includes(model.task), LookTab],
  write: ["Write", (model) => model.task === "generation", WriteTab],
  chat: ["Chat", (model) => model.task === "generation" && model.chat, ChatTab],
  classify: ["Classify", (model) => ["classification", "images"].includes(model.task), ClassifyTab],
  vectors: ["Vectors", (model) => ["vectors", "embedding"].includes(model.task), VectorsTab],
};

const app = {
  limits: {}, // {characters, tokens}
  fileFormats: [],
  translated: null, // what was translated last, for the Look tab
  tabs: {},
  theme, open,
};

const main = document.getElementById("main");

// ---- models and tabs -------------------------------------------------------------------------------------------------

async function start() {
  const notice = new Notice();
  const again = () => start();
  try {
    const [served, settings] = await Promise.all([get("/regard/models"), get("/frontend/settings").catch(() => ({}))]);
    build(served, settings);
    document.getElementById("key").hidden = true;
  } catch (error) {
    notice.show(error, again);
    main.replaceChildren(notice.node);
  }
}

function build(served, settings) {
  const { models = [], limits = {}, version = "" } = served;
  const ordered = [...models].sort((a, b) => (b.name === served.default) - (a.name === served.default));
  app.limits = { characters: limits.max_characters ?? settings.charLimit ?? 0, tokens: limits.max_new_tokens ?? 4096 };
  app.fileFormats = settings.supportedFilesFormat ?? [];
  app.tabs = {};
  for (const [name, [, isFor, Tab]] of Object.entries(TABS)) {
    const own = ordered.filter(isFor);
    if (own.length) app.tabs[name] = new Tab(app, own);
  }
  const link = (name) => element("a", { href: `#${name}`, "data-tab": name }, TABS[name][0]);
  document.getElementById("tabs").replaceChildren(...Object.keys(app.tabs).map(link));
  document.getElementById("about").textContent = `Regard ${version} · ${ordered.map((one) => one.name).join(", ")}`;
  if (!Object.keys(app.tabs).length) {
    main.replaceChildren(element("p", { class: "empty" }, "This server has no model that this page can use."));
    return;
  }
  show();
}

function open(name) {
  location.hash = name;
}

function show() {
  const asked = location.hash.slice(1);
  if (asked === "main") return; // the link to the content
  const name = app.tabs[asked] ? asked : Object.keys(app.tabs)[0];
  if (!name) return;
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.dataset.tab === name) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else link.removeAttribute("aria-current");
  }
  const tab = app.tabs[name];
  for (const one of Object.values(app.tabs)) {
    if (!one.node.isConnected || one.node.parentNode !== main) continue;
    one.node.hidden = one !== tab;
  }
  document.getElementById("start")?.remove();
  for (const node of [...main.children]) if (!Object.values(app.tabs).some((one) => one.node === node)) node.remove();
  if (!main.contains(tab.node)) main.append(tab.node);
  tab.node.hidden = false;
  document.title = `${TABS[name][0]} · Regard`;
  document.documentElement.dataset.tab = name;
  tab.show?.();
  if (matchMedia("(hover: hover)").matches) tab.focus?.(); // a keyboard on the screen would cover half of a phone
}

addEventListener("hashchange", show);

// ---- API key ---------------------------------------------------------------------------------------------------------

const keyForm = document.getElementById("key");
const keyField = document.getElementById("key-field");

addEventListener("key-wanted", ({ detail }) => {
  keyForm.hidden = false;
  const said = hasKey() ? "The server refused this key. " : "This server wants an API key. ";
  document.getElementById("key-message").textContent = said + (detail.status === 403 ? detail.message : "");
  keyField.focus();
});

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(keyField.value.trim());
  keyField.value = "";
  keyForm.hidden = true;
  announce("The key is used from now on.");
  const [tab] = Object.values(app.tabs).filter((one) => one.node.isConnected && !one.node.hidden);
  if (tab?.translate) tab.translate();
  else if (!tab) start();
});

// ---- colours ---------------------------------------------------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");

function theme() {
  return document.documentElement.dataset.theme || (system.matches ? "dark" : "light");
}

function showTheme() {
  const other = theme() === "dark" ? "light" : "dark";
  const label = other === "dark" ? "Dark colours" : "Light colours";
  themeButton.replaceChildren(icon(other));
  themeButton.setAttribute("aria-label", label);
  themeButton.title = label;
  dispatchEvent(new CustomEvent("theme-changed"));
}

themeButton.addEventListener("click", () => {
  const other = theme() === "dark" ? "light" : "dark";
  const isSystem = other === (system.matches ? "dark" : "light");
  if (isSystem) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = other;
  store("localStorage", "regard.theme", isSystem ? null : other);
  showTheme();
});

system.addEventListener("change", showTheme);
showTheme();
start();
