/**
 * The page: header, tabs, keyboard, and redrawing when the state changes.
 *
 * A page without a document waits for `open`. It sends a "regard-drawn" event whenever it has been drawn, and
 * "regard-picked" when a cell is chosen, so that a page around it can change the model there.
 */
Regard.main = (() => {
  const { element, choice, faint, harmless } = Regard.dom;
  const { now, change, changeKind, CHOICES, MEAN } = Regard.state;
  const { kindsOf, layersOf, layerOf, nameOf } = Regard.document;
  const TABS = { // name, whether a view has it, how it is drawn
    picture: ["Picture", (view) => view.picture, Regard.picture.draw],
    attention: ["Attention", (view) => view.attention.length, Regard.attention.draw],
    chain: ["Chain", (view) => view.chain?.length, Regard.chain.draw],
    predictions: ["Predictions", (view) => view.predictions?.length || view.labels?.length, Regard.predictions.draw],
    tree: ["Beam tree", (view) => view.tree?.steps.length, Regard.tree.draw],
    compare: ["Compare", () => Regard.document.views.length > 1, Regard.compare.draw],
  };
  const HELP = [
    ["← →", "head"], ["[ ]", "layer"], ["T", "kind"], ["1 … 6", "tab"], ["V", "heat-map, lines, all heads"],
    ["W", "words or pieces"], ["H", "sinks"], ["C", "scale of colours"], ["D", "dark or light"], ["Esc", "unpin all"],
  ];

  const view = () => Regard.document.views[now.view];
  const tabs = () => Object.keys(TABS).filter((tab) => TABS[tab][1](view()));
  let drawing = 0;

  /** Draw all that depends on the state; results that are not ready before the next change are discarded. */
  async function draw() {
    const mine = ++drawing;
    if (!tabs().includes(now.tab)) now.tab = tabs()[0];
    document.documentElement.dataset.theme = Regard.colour.theme();
    const body = await Promise.resolve(view()).then(TABS[now.tab][2]).catch(failed);
    if (mine === drawing) show(body);
  }

  function show(body) {
    const focused = document.activeElement?.dataset?.key;
    Regard.dom.untip();
    document.title = `${view().title} · Regard`;
    const open = [...document.querySelectorAll("#header details")].map((details) => details.open);
    document.getElementById("header").replaceChildren(header(view(), open));
    document.getElementById("tabs").replaceChildren(...tabs().map(tabButton), themeButton());
    document.getElementById("main").replaceChildren(body);
    if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    document.documentElement.dataset.drawn = String(drawing);
    dispatchEvent(new CustomEvent("regard-drawn", { detail: { ...now, layer: layerOf(view(), now.kind, now.layer)?.name } }));
  }

  /** Announce the cell of an attention matrix that was chosen. */
  function picked({ attention, head, rows, columns }, r, c) {
    const detail = { layer: attention.name, kind: attention.kind, head, query: rows[r], key: columns[c] };
    dispatchEvent(new CustomEvent("regard-picked", { detail }));
  }

  function failed(error) {
    console.error(error);
    return element("p", { role: "alert" }, `This could not be drawn: ${error.message}`);
  }

  function tabButton(tab) {
    const known = { class: "tab", "data-key": `tab ${tab}`, "aria-current": tab === now.tab && "page" };
    return Regard.dom.button(TABS[tab][0], () => change({ tab }), known);
  }

  const otherTheme = () => change({ theme: Regard.colour.dark() ? "light" : "dark" });

  function themeButton() {
    const dark = Regard.colour.dark();
    const more = { class: "theme", "aria-label": "Dark colours" };
    return choice(dark ? "☀ Light" : "☾ Dark", dark, otherTheme, "theme", more);
  }

  // ---- the header ----------------------------------------------------------------------------------------------------

  function header(shown, open) {
    const line = (label, text) => Boolean(text) && element("div", { class: "said" },
      element("span", { class: "label" }, label), element("bdi", { dir: "auto" }, harmless(text)));
    if (now.tab === "compare") {
      const { views } = Regard.document;
      const both = views.map((one, i) => about(one, open[i], i));
      const names = element("h1", {}, harmless(views.map(nameOf).join(" · ")));
      return element("div", {}, names, line("Input", shown.input), both);
    }
    const lines = [line("Input", shown.input), line("Output", shown.output), line("Changed", shown.changes?.join("; "))];
    return element("div", {}, element("h1", {}, harmless(nameOf(shown))), lines, about(shown, open[0]));
  }

  /** `which` is the index of one of two views. */
  function about({ model = {}, notes = [] }, open, which = null) {
    const rows = Object.entries(model).map(([key, value]) => element("tr", {},
      element("th", { scope: "row" }, key.replaceAll("_", " ")), element("td", {}, plain(value))));
    const said = `${which === null ? "" : `${"AB"[which]}: `}${notes.length ? "Model and notes" : "Model"}`;
    const title = element("summary", { "data-key": `about ${which ?? ""}` }, said);
    const table = element("table", { class: "model" }, element("tbody", {}, rows));
    const list = element("ul", { class: "notes" }, notes.map((note) => element("li", {}, note)));
    return element("details", { class: "about", open: open ? "" : false }, title, table, list);
  }

  /** Format a value of the table that describes the model. */
  function plain(value) {
    if (Array.isArray(value)) return value.map(plain).join(", ");
    if (value && typeof value === "object") return plain(Object.entries(value).map(([key, one]) => `${key} ${plain(one)}`));
    return typeof value === "number" ? value.toLocaleString("en") : String(value ?? "–");
  }

  function help() {
    const keys = HELP.map(([key, what]) => element("span", {}, element("kbd", {}, key), ` ${what}`));
    const inside = faint("In a map: arrows move, Enter pins the query, K the key.");
    return element("div", { id: "help", class: "faint" }, "Keys:", keys, inside);
  }

  // ---- keyboard ------------------------------------------------------------------------------------------------------

  const next = (list, value, step = 1) => list[(list.indexOf(value) + step + list.length) % list.length];
  const turn = (key) => change({ [key]: next(CHOICES[key], now[key]) });

  const ACTIONS = {
    ArrowLeft: () => turnHead(-1), ArrowRight: () => turnHead(1), "[": () => turnLayer(-1), "]": () => turnLayer(1),
    k: () => turnLayer(-1), j: () => turnLayer(1), t: () => changeKind(next(kindsOf(view()), now.kind)),
    v: () => turn("show"), w: () => change({ words: !now.words }), h: () => turn("sinks"), c: () => turn("scale"),
    d: otherTheme, Escape: () => change({ queries: [], keys: [] }),
  };

  function turnHead(step) {
    const heads = [...Array(layerOf(view(), now.kind, now.layer).heads).keys(), MEAN];
    change({ head: next(heads, now.head, step) });
  }

  function turnLayer(step) {
    const layers = layersOf(view(), now.kind).map((one) => one.layer);
    change({ layer: layers[Math.min(layers.length - 1, Math.max(0, layers.indexOf(now.layer) + step))] });
  }

  function pressed(event) {
    if (event.key.startsWith("Arrow") && event.target.matches(".scroll")) return; // it scrolls
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const tab = tabs()[Number(event.key) - 1];
    const act = tab ? () => change({ tab }) : ACTIONS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  // ---- start ---------------------------------------------------------------------------------------------------------

  /** Draw the document of this file, or a given one (20-document.js). */
  function open(given = null) {
    Regard.state.begin(Regard.document.load(given).views[0], draw);
    if (!started) start();
    return draw();
  }

  let started = false;

  function start() {
    started = true;
    document.getElementById("footer").replaceChildren(help());
    addEventListener("keydown", pressed);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth !== width) draw();
      width = innerWidth;
    });
  }

  try {
    const isFile = document.getElementById("document") !== null;
    if (isFile) open();
  } catch (error) {
    document.getElementById("main").replaceChildren(failed(error));
  }

  return { open, picked };
})();
