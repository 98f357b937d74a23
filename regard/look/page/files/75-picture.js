/** The Picture tab: the weights of the summary token or a patch over an image; one head large, all of its layer small. */
Regard.picture = (() => {
  const { element, svg, controls, card, faint, choice, percent } = Regard.dom;
  const { now, change, MEAN } = Regard.state;
  const { titleOf, choices, chooser, viewChooser } = Regard.attention;
  const PLAIN = { words: false, sinks: "show" };
  const [LARGE, SMALL] = [460, 104]; // pixels
  const [GLOW, SHADE] = [[255, 152, 32], [70, 70, 70]];

  async function draw(view) {
    const layer = Regard.document.layerOf(view, now.kind, now.layer);
    const patches = patchesOf(view, layer);
    const query = now.queries.at(-1) ?? 0;
    const row = await rowOf(view, layer, now.head, query, patches);
    const title = `${titleOf(layer, now.head)}: where ${nameOf(patches, query)} looks`;
    const large = overlay(view, patches, row, LARGE, query);
    const readout = Regard.dom.readout("Point at a patch for its weight; click it to see where it looks.");
    addListeners(large, patches, row, query, readout);
    const save = { csv: () => csv(patches, row), picture: () => overlay(view, patches, row, LARGE, query) };
    const main = card(title, large, readout, Regard.heat.legend(legendOf(row)), summaryNote(row),
      Regard.export.buttons(title, save));
    return element("div", {}, controls(viewChooser(), chooser(view)), options(patches, query),
      element("div", { class: "beside" }, main, await gallery(view, layer, patches, query)));
  }

  /** Patches come last in the token sequence; the tokens before them are summary tokens. */
  function patchesOf(view, layer) {
    const { rows, columns } = view.picture;
    return { rows, columns, before: view.strips[layer.keys].ids.length - rows * columns };
  }

  function nameOf({ before, columns }, place) {
    if (place < before) return "the summary token";
    return `patch (row ${Math.floor((place - before) / columns) + 1}, column ${((place - before) % columns) + 1})`;
  }

  /** Return the weights of one query on each patch and on other tokens; `to` is the end of the scale. */
  async function rowOf(view, layer, head, query, { before }) {
    const matrix = await Regard.matrix.shown(view, layer, head, PLAIN);
    const all = Regard.matrix.row(matrix, query);
    const weights = all.subarray(before);
    const to = now.scale === "one" ? 1 : Math.max(...weights);
    const summary = all.subarray(0, before).reduce((a, b) => a + b, 0);
    return { weights, summary, before, to, said: (i) => Regard.matrix.exactAt(matrix, query, before + i) };
  }

  function options({ before }, query) {
    const says = { max: "to the maximum", one: "from 0 to 1" };
    return controls(before > 0 && choice("Summary token", query < before, () => change({ queries: [0] }), "summary"),
      choices("Colours", "scale", Object.keys(says), (scale) => says[scale]));
  }

  function legendOf({ to }) {
    const colour = (value) => SHADE.map((from, i) => Math.round(from + (to > 0 ? value / to : 0) * (GLOW[i] - from)));
    const scaleText = now.scale === "one" ? "weight, fixed from 0 to 1" : "weight, from 0 to the maximum of this row";
    return { colour, from: 0, to, at: (share) => share * to, scaleText };
  }

  function summaryNote({ before, summary, weights }) {
    const rest = weights.reduce((a, b) => a + b, 0);
    const said = `${percent(rest)} of the weight is on the picture, ${percent(summary)} on the summary token beside it.`;
    return before > 0 && faint(said);
  }

  /** Draw the image in grey, and each patch as bright as its weight. */
  function overlay(view, { rows, columns, before }, { weights, to }, side, query) {
    const [w, h] = [side / columns, side / columns];
    const height = h * rows;
    const box = (i) => ({ x: (i % columns) * w, y: Math.floor(i / columns) * h, width: w, height: h });
    const glow = Array.from(weights, (weight, i) => {
      const opacity = to > 0 ? 0.85 * Math.min(1, weight / to) : 0;
      return svg("rect", { ...box(i), fill: Regard.colour.css(GLOW), "fill-opacity": opacity.toFixed(4), "data-patch": i });
    });
    const frame = { fill: "none", stroke: Regard.colour.ink("accent"), "stroke-width": 3, "pointer-events": "none" };
    const whole = { width: side, height, "pointer-events": "none" };
    const drawn = Regard.heat.sheet(side, height,
      svg("image", { ...whole, href: view.picture.png, preserveAspectRatio: "none", style: "image-rendering:pixelated" }),
      svg("rect", { ...whole, fill: "#000000", "fill-opacity": 0.3 }), glow,
      query >= before && svg("rect", { ...box(query - before), ...frame }));
    drawn.setAttribute("class", "overlay");
    return drawn;
  }

  function addListeners(drawn, patches, row, query, readout) {
    const said = "The picture. Arrow keys move from patch to patch.";
    const known = { tabindex: "0", "data-key": "picture", role: "img", "aria-label": said };
    for (const [key, value] of Object.entries(known)) drawn.setAttribute(key, value);
    drawn.addEventListener("pointermove", (event) => {
      const patch = event.target.dataset.patch;
      if (patch === undefined) return;
      const lines = [nameOf(patches, Number(patch) + patches.before), `weight ${row.said(Number(patch))}`];
      readout.textContent = lines.join(": ");
      Regard.dom.tip(event, lines);
    });
    drawn.addEventListener("pointerleave", Regard.dom.untip);
    drawn.addEventListener("click", ({ target }) => {
      if (target.dataset.patch !== undefined) change({ queries: [Number(target.dataset.patch) + patches.before] });
    });
    drawn.addEventListener("keydown", (event) => keyed(event, patches, query));
  }

  function keyed(event, { before, columns, rows }, query) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!step) return;
    const to = query < before ? before : query + step;
    if (to >= before && to < before + rows * columns) change({ queries: [to] });
    event.preventDefault();
    event.stopPropagation();
  }

  /** Small pictures of every head of this layer. */
  async function gallery(view, layer, patches, query) {
    const thumbs = await Promise.all(Array.from({ length: layer.heads }, async (_, head) => {
      const row = await rowOf(view, layer, head, query, patches);
      const inside = [overlay(view, patches, row, SMALL, query), element("span", {}, `head ${head}`)];
      const more = { class: "thumb labelled" };
      return choice(inside, [head, MEAN].includes(now.head), () => change({ head }), `picture head ${head}`, more);
    }));
    const all = card(`All heads of ${layer.name}`, element("div", { class: "gallery" }, thumbs));
    return element("aside", { class: "panel" }, all);
  }

  function csv({ rows, columns }, { weights }) {
    return Regard.export.csv(Array.from({ length: rows }, (_, r) => [...weights.subarray(r * columns, (r + 1) * columns)]));
  }

  return { draw };
})();
