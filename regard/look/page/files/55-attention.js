/** The Attention tab: the weights of a head as a heat-map or as lines, or all heads at once. */
Regard.attention = (() => {
  const { element, button, choice, group, select, controls, card, faint, token, exact, brief } = Regard.dom;
  const { change, changeKind, pin, MEAN, now } = Regard.state;
  const { KINDS, kindsOf, layersOf, layerOf } = Regard.document;
  const SHOWS = { heat: "Heat-map", lines: "Lines", grid: "All heads" };
  const SINKS = [["show", "shown"], ["hide", "hidden"], ["renormalize", "hidden, rows renormalised"]];
  const NOTHING = "All keys are hidden: they are special tokens and punctuation. Show sinks to see them.";
  const SCALES = [["one", "from 0 to 1"], ["max", "from 0 to the maximum"], ["log", "logarithmic"]];

  // ---- controls, some of which other tabs use too --------------------------------------------------------------------

  /** Buttons for the values of one field of the state. */
  function choices(label, key, values, say = String) {
    const one = (value) => choice(say(value), value === now[key], () => change({ [key]: value }), `${key} ${value}`);
    return group(label, values.map(one));
  }

  /** Controls for kind, layer and head. */
  function chooser(view) {
    const layers = layersOf(view, now.kind).map((layer) => layer.layer);
    const heads = layerOf(view, now.kind, now.layer)?.heads ?? 0;
    const kind = (name) => choice(KINDS[name], name === now.kind, () => changeKind(name), `kind ${name}`);
    const head = (i) => (i === MEAN ? "mean" : String(i));
    return [
      kindsOf(view).length > 1 && group("Kind", kindsOf(view).map(kind)),
      layers.length > 1 && choices("Layer", "layer", layers),
      heads > 1 && choices("Head", "head", [...Array(heads).keys(), MEAN], head),
    ];
  }

  /** A control for which of two views this tab shows. */
  function viewChooser() {
    const { views, nameOf } = Regard.document;
    return views.length > 1 && choices("View", "view", [0, 1], (i) => nameOf(views[i]));
  }

  /** Controls for words or pieces, sinks, and the scale of colours. */
  function display(view) {
    const pieces = Object.values(view.strips).some((strip) => strip.words?.length < strip.ids.length);
    return [
      pieces && choice("Words instead of pieces", now.words, () => change({ words: !now.words }), "words"),
      select("Sinks", SINKS, now.sinks, (sinks) => change({ sinks }), "sinks"),
      select("Colours", SCALES, now.scale, (scale) => change({ scale }), "scale"),
    ];
  }

  // ---- the tab -------------------------------------------------------------------------------------------------------

  async function draw(view) {
    const matrix = await Regard.matrix.shown(view, layerOf(view, now.kind, now.layer), now.head, now);
    const shows = choices("Show", "show", Object.keys(SHOWS), (show) => SHOWS[show]);
    const far = now.show === "heat" && Regard.heat.isLong(matrix);
    const zoom = far && choices("Zoom", "zoom", [1, 2, 4, 8], (times) => `${times}×`);
    return element("div", {}, controls(viewChooser(), chooser(view)), controls(shows, display(view), zoom),
      now.show === "grid" ? gridCard(view) : pictureCard(view, matrix));
  }

  /** The options of a heat-map or of lines (40-heat.js). */
  function optionsFor(matrix, given = {}) {
    const { attention: layer, view } = matrix;
    const what = now.show === "lines" ? "line" : "cell";
    const readout = Regard.dom.readout(`Point at a ${what} for its number; click a token to pin it.`);
    return {
      title: titleOf(layer, matrix.head), queries: view.strips[layer.queries].label, keys: view.strips[layer.keys].label,
      width: room(), zoom: now.zoom, ...Regard.colour.weights(Regard.matrix.most(matrix), "what is shown"),
      pins: Regard.matrix.pinsOf(matrix, now), readout, key: "cells",
      written: (value) => value.toFixed(2).replace(/^0/, ""),
      describe: (r, c) => describe(matrix, r, c),
      onhover: (r, c) => readout.replaceChildren(...sentence(matrix, r, c)),
      onpin: (axis, side) => pin(axis, side.places),
      onpick: (r, c) => Regard.main.picked(matrix, r, c),
      ...given,
    };
  }

  function titleOf(layer, head) {
    return `${layer.name}${layer.heads > 1 ? `, ${head === MEAN ? "mean of heads" : `head ${head}`}` : ""}`;
  }

  /** Return the width for a picture in pixels, beside the panel at the right if both fit. */
  function room() {
    const width = document.getElementById("main").clientWidth;
    return width - (width > 970 ? 430 : 40);
  }

  function pictureCard(view, matrix) {
    const options = optionsFor(matrix);
    if (!matrix.columns.length) return card(options.title, element("p", {}, NOTHING));
    const drawn = Regard[now.show].draw(matrix, options);
    const notes = [...matrix.notes, drawn.note, differenceOf(matrix.attention)].filter(Boolean);
    const left = card(options.title, faint(explain(view, matrix)), drawn.node, options.readout,
      now.show === "heat" && Regard.heat.legend(options), notes.map((note) => faint(note)),
      Regard.export.buttons(options.title, { csv: () => Regard.export.matrixCsv(matrix), picture: drawn.picture }));
    return element("div", { class: "beside" }, left, panel(view, matrix, options.pins));
  }

  function explain(view, matrix) {
    const { attention: layer } = matrix;
    const [queries, keys] = [view.strips[layer.queries].label, view.strips[layer.keys].label];
    const looks = `a token of ${queries} that looks at its keys, tokens of ${queries === keys ? "the same" : keys}`;
    const step = ["cross", "alignment"].includes(layer.kind) && view.predictions?.length;
    return [`Each row is a query: ${looks}. ${sums(matrix)}`,
      Regard.matrix.anyMasked(matrix) && " Tokens it may not see have no colour.",
      step && " A row is a step of the decoder: the token that it read → the one it wrote."];
  }

  /** Return a sentence on the sums of rows, as far as rounded weights allow. */
  function sums(matrix) {
    const all = matrix.rows.map((_, r) => Regard.matrix.sumOfRow(matrix, r));
    const [least, most] = [Math.min(...all), Math.max(...all)];
    if (most === 0 && now.sinks === "show") return "Its weights sum to 0: this head is switched off.";
    const near = matrix.rounded ? 0.05 : 1e-3;
    if (Math.abs(least - 1) <= near && Math.abs(most - 1) <= near) return "Its weights sum to 1.";
    const range = [...new Set([brief(least), brief(most)])].join(" … ");
    return `Its weights sum to ${range}${matrix.rounded ? " (as rounded)" : ""}.`;
  }

  function differenceOf(layer) {
    if (typeof layer.difference !== "number") return "";
    return `These weights times the values are within ${brief(layer.difference)} of what the model's own kernel returned.`;
  }

  function gridCard(view) {
    const drawn = Regard.grid.draw(view, now.kind, 96, (layer, head) => change({ layer, head, show: "heat" }));
    const scale = now.scale === "max" ? "Each head has its own scale, from 0 to its maximum" : "All are on one scale";
    return card(`${KINDS[now.kind]}: layers down, heads across`,
      faint(`${scale}. A pixel shows the largest weight under it. Click one to look closer.`), drawn.node,
      Regard.export.buttons(`${now.kind} heads`, { picture: drawn.picture }));
  }

  // ---- the panel at the right ----------------------------------------------------------------------------------------

  function panel(view, matrix, pins) {
    const heads = Math.max(...layersOf(view, now.kind).map((layer) => layer.heads));
    const size = Math.max(20, Math.min(64, Math.floor(310 / heads) - 10));
    const grid = Regard.grid.draw(view, now.kind, size, (layer, head) => change({ layer, head }));
    const all = card("Layers (down) and heads (across)", grid.node);
    return element("aside", { class: "panel" }, pinnedCard(matrix, pins), all);
  }

  function pinnedCard(matrix, { rows, columns }) {
    const none = !rows.length && !columns.length;
    const help = "Click a token beside or above the map. Several queries are averaged, several keys summed.";
    const { meanRow, sumColumn } = Regard.matrix;
    const bars = (title, sides, values) => Regard.lines.bars(title, sides, values, matrix.rounded);
    return card("Pinned tokens", none ? faint(help) : button("Unpin all", () => change({ queries: [], keys: [] })),
      rows.length > 0 && bars(rowTitle(matrix, rows), matrix.columns, meanRow(matrix, rows)),
      columns.length > 0 && bars(columnTitle(matrix, columns), matrix.rows, sumColumn(matrix, columns)));
  }

  const named = (sides, which) => which.map((i, n) => [n > 0 && ", ", token(sides[i].label)]);

  function rowTitle(matrix, rows) {
    return ["What ", named(matrix.rows, rows), rows.length > 1 ? ` look at (mean of ${rows.length} queries)` : " looks at"];
  }

  function columnTitle(matrix, columns) {
    return ["Who looks at ", named(matrix.columns, columns), columns.length > 1 && ` (sum of ${columns.length} keys)`];
  }

  // ---- one cell in words ---------------------------------------------------------------------------------------------

  const sideText = (side) => [`${side.places.join("+")} `, token(side.label)];

  function weightText(matrix, r, c) {
    return Regard.matrix.masked(matrix, r, c) ? "masked" : Regard.matrix.exactAt(matrix, r, c);
  }

  function sumText(matrix, r) {
    const sum = Regard.matrix.sumOfRow(matrix, r);
    return `row sum ${matrix.rounded ? brief(sum) : exact(sum)}`;
  }

  function describe(matrix, r, c) {
    return [element("strong", { class: "weight" }, weightText(matrix, r, c)), ["query ", sideText(matrix.rows[r])],
      ["key ", sideText(matrix.columns[c])], sumText(matrix, r)];
  }

  function sentence(matrix, r, c) {
    const { predictionOf } = Regard.document;
    const { chosen: wrote, given } = predictionOf(matrix.view, matrix.attention.queries, matrix.rows[r].last) ?? {};
    const number = element("strong", {}, weightText(matrix, r, c));
    const more = wrote ? [given ? " · given " : " · wrote ", token(wrote.piece)] : [];
    const tokens = ["query ", ...sideText(matrix.rows[r]), " → key ", ...sideText(matrix.columns[c]), ": "];
    return [...tokens, number, ` · ${sumText(matrix, r)}`, ...more];
  }

  return { NOTHING, draw, choices, chooser, viewChooser, display, optionsFor, titleOf };
})();
