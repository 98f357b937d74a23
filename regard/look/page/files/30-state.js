/**
 * The state of the page. It is written into the address after "#", so that a link or a reload opens the same view.
 *
 * All changes go through `change`, which redraws the page.
 */
Regard.state = (() => {
  const MEAN = -1; // the number of the mean over all heads
  const CHOICES = {
    sinks: ["show", "hide", "renormalize"],
    scale: ["one", "max", "log"],
    show: ["heat", "lines", "grid"],
    theme: ["", "light", "dark"],
  };
  const DEFAULTS = {
    tab: "attention", view: 0, kind: "", layer: 0, head: 0, queries: [], keys: [],
    words: false, sinks: "show", scale: "one", show: "heat", zoom: 1, theme: "",
  };
  const now = { ...DEFAULTS };
  let draw = () => {};

  /** Return the initial state, unless the address has one: the last layer of the main kind of attention. */
  function begin(view, drawAll) {
    Object.assign(now, DEFAULTS);
    const kinds = Regard.document.kindsOf(view);
    now.kind = kinds.includes("cross") ? "cross" : kinds.includes("alignment") ? "alignment" : kinds[0] ?? "";
    now.layer = Regard.document.layersOf(view, now.kind).at(-1)?.layer ?? 0;
    now.tab = view.picture ? "picture" : "attention";
    const long = Object.values(view.strips).some((strip) => strip.ids.length > 64);
    now.scale = view.picture ? "max" : long ? "log" : "one";
    Object.assign(DEFAULTS, now);
    if (draw !== drawAll) addEventListener("hashchange", () => { fromHash(); drawAll(); });
    draw = drawAll;
    fromHash();
  }

  function change(some) {
    Object.assign(now, some);
    tidy();
    toHash();
    draw();
  }

  /** Restrict the state to layers, heads and tokens that this view has. */
  function tidy() {
    const views = Regard.document.views;
    now.view = Math.min(now.view, views.length - 1);
    const view = views[now.view];
    if (!Regard.document.kindsOf(view).includes(now.kind)) now.kind = Regard.document.kindsOf(view)[0] ?? "";
    const layers = Regard.document.layersOf(view, now.kind);
    if (!layers.length) return;
    const layer = layers.find((one) => one.layer === now.layer) ?? layers.at(-1);
    now.layer = layer.layer;
    now.head = Math.min(now.head, layer.heads - 1);
    now.queries = within(now.queries, view.strips[layer.queries]);
    now.keys = within(now.keys, view.strips[layer.keys]);
  }

  const within = (places, strip) => [...new Set(places)].filter((place) => place >= 0 && place < strip.ids.length);

  /** Choose another kind of attention; pinned tokens are kept if the token sequence is the same. */
  function changeKind(kind) {
    const view = Regard.document.views[now.view];
    const [before, after] = [now.kind, kind].map((name) => Regard.document.layersOf(view, name)[0]);
    const kept = (strip, places) => (before && before[strip] === after[strip] ? places : []);
    change({ kind, queries: kept("queries", now.queries), keys: kept("keys", now.keys) });
  }

  /** Pin or unpin a token; `places` are the pieces of a word, or one token. */
  function pin(axis, places) {
    const all = places.every((place) => now[axis].includes(place));
    const others = now[axis].filter((place) => !places.includes(place));
    change({ [axis]: all ? others : [...others, ...places] });
  }

  // ---- the address ---------------------------------------------------------------------------------------------------

  function toHash() {
    const said = Object.keys(DEFAULTS).filter((key) => String(now[key]) !== String(DEFAULTS[key]));
    const words = said.map((key) => `${key}=${encodeURIComponent(written(key, now[key]))}`);
    try {
      history.replaceState(null, "", words.length ? `#${words.join("&")}` : "#");
    } catch {
      // inside a notebook there is no address to write to
    }
  }

  function written(key, value) {
    if (key === "head") return value === MEAN ? "mean" : String(value);
    return typeof value === "boolean" ? String(Number(value)) : String(value);
  }

  function fromHash() {
    const said = new URLSearchParams(location.hash.slice(1));
    for (const [key, first] of Object.entries(DEFAULTS)) {
      now[key] = said.has(key) ? meant(key, said.get(key), first) : copied(first);
    }
    tidy();
  }

  const copied = (value) => (Array.isArray(value) ? [...value] : value);

  function meant(key, text, first) {
    if (key === "head" && text === "mean") return MEAN;
    if (CHOICES[key]) return CHOICES[key].includes(text) ? text : first;
    if (Array.isArray(first)) return text.split(",").map(Number).filter(Number.isInteger);
    if (typeof first === "boolean") return text === "1";
    if (typeof first === "number") return Number.isInteger(Number(text)) && Number(text) >= 0 ? Number(text) : first;
    return text;
  }

  return { now, begin, change, changeKind, pin, CHOICES, MEAN };
})();
