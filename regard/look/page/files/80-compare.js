/** The Compare tab: two views on one scale, with both outputs, the same head of both side by side, and their difference. */
Regard.compare = (() => {
  const { element, controls, card, faint, table, token, exact, brief, fixed } = Regard.dom;
  const { now, change } = Regard.state;
  const { NOTHING, optionsFor, titleOf, chooser, display } = Regard.attention;
  const LARGEST = 12; // number of differences that are listed

  async function draw(view) {
    const { views, KINDS } = Regard.document;
    const layers = views.map(layerIn);
    const none = `Only one of the two has ${KINDS[now.kind]}.`;
    return element("div", {}, outputs(views), controls(chooser(view)), controls(display(view)),
      layers.every(Boolean) ? await maps(views, layers) : card("", none));
  }

  /** Return the chosen layer, or the last of a smaller model; the alignment of a recurrent model counts as cross-attention. */
  function layerIn(view) {
    const { layerOf, layersOf } = Regard.document;
    const other = { cross: "alignment", alignment: "cross" }[now.kind];
    return layerOf(view, now.kind, now.layer) ?? layersOf(view, now.kind).at(-1) ?? layersOf(view, other).at(-1);
  }

  async function maps(views, layers) {
    const shown = (view, i) => Regard.matrix.shown(view, layers[i], Math.min(now.head, layers[i].heads - 1), now);
    const matrices = await Promise.all(views.map(shown));
    if (!matrices.every((matrix) => matrix.columns.length)) return card("", NOTHING);
    const scale = Regard.colour.weights(Math.max(...matrices.map(Regard.matrix.most)), "both");
    const why = noDifference(matrices);
    return [notBoth(matrices), element("div", { class: "pair" }, matrices.map((matrix) => one(matrix, scale))),
      why ? card("Difference", element("p", {}, why)) : difference(views, ...matrices)];
  }

  const titles = (matrices) => [...new Set(matrices.map(({ attention, head }) => titleOf(attention, head)))];

  function notBoth(matrices) {
    const names = titles(matrices);
    return names.length > 1 && faint(`The two do not have the same layers and heads: here are ${names.join(" and ")}.`);
  }

  function one(matrix, scale) {
    const name = Regard.document.nameOf(matrix.view);
    const options = optionsFor(matrix, { ...scale, width: half(), zoom: 1, key: `cells ${name}` });
    const drawn = Regard.heat.draw(matrix, options);
    const save = { csv: () => Regard.export.matrixCsv(matrix), picture: drawn.picture };
    return card(name, faint(options.title), drawn.node, options.readout, Regard.heat.legend(options),
      Regard.export.buttons(`${name} ${options.title}`, save));
  }

  function half() {
    const width = document.getElementById("main").clientWidth;
    return (width > 860 ? width / 2 : width) - 60;
  }

  // ---- the difference ------------------------------------------------------------------------------------------------

  /** Return why there is no difference: weights are only compared between the same tokens. */
  function noDifference([a, b]) {
    const same = (x, y) => x.length === y.length && x.every((side, i) => side.label === y[i].label);
    const axes = [!same(a.rows, b.rows) && "queries", !same(a.columns, b.columns) && "keys"].filter(Boolean);
    const why = `The two have other tokens as ${axes.join(" and ")}, so a cell of one has no partner in the other.`;
    return axes.length > 0 && why;
  }

  function difference(views, a, b) {
    const { masked } = Regard.matrix;
    const hidden = (r, c) => masked(a, r, c) && masked(b, r, c);
    const matrix = { ...a, values: b.values.map((value, i) => value - a.values[i]), hidden };
    const most = matrix.values.reduce((found, x) => Math.max(found, Math.abs(x)), 0);
    const mean = matrix.values.reduce((sum, x) => sum + Math.abs(x), 0) / matrix.values.length;
    const options = signedOptions(matrix, a, b, now.scale === "one" ? 1 : most);
    const drawn = Regard.heat.draw(matrix, options);
    const save = { csv: () => Regard.export.matrixCsv(matrix), picture: drawn.picture };
    return element("div", { class: "beside" },
      card("Difference: B minus A", faint(options.title), drawn.node, Regard.heat.legend(options),
        faint(`At most ${brief(most)}, on average ${brief(mean)} (without signs).`),
        Regard.export.buttons(options.title, save)),
      element("aside", { class: "panel" }, largest(matrix, a, b)));
  }

  function signedOptions(matrix, a, b, end) {
    const { at, exactAt } = Regard.matrix;
    const errorAt = (r, c) => a.error(r, at(a, r, c)) + b.error(r, at(b, r, c));
    const which = now.scale === "one" ? "fixed from −1 to 1" : "to the largest difference";
    return optionsFor(matrix, {
      title: `difference of ${titles([a, b]).join(" and ")}`, key: "cells difference", zoom: 1,
      ...Regard.colour.signed(end, `B minus A, ${which}`),
      written: (value) => (Math.abs(value) < 0.005 ? "0" : fixed(value, 2).replace("0.", ".")),
      onhover: null, onpick: null,
      describe: (r, c) => [element("strong", { class: "weight" }, exact(at(matrix, r, c), errorAt(r, c))),
        ["query ", token(matrix.rows[r].label), " → key ", token(matrix.columns[c].label)],
        `A ${exactAt(a, r, c)}`, `B ${exactAt(b, r, c)}`],
    });
  }

  function largest(matrix, a, b) {
    const size = (i) => Math.abs(matrix.values[i]);
    const order = [...matrix.values.keys()].sort((i, j) => size(j) - size(i)).slice(0, LARGEST);
    const rows = order.map((i, rank) => {
      const [row, column] = [matrix.rows[Math.floor(i / matrix.columns.length)], matrix.columns[i % matrix.columns.length]];
      const numbers = [a, b, matrix].map(({ values }) => element("td", { class: "number" }, fixed(values[i], 4)));
      const pin = () => change({ queries: [...row.places], keys: [...column.places] });
      const keyed = (event) => event.key === "Enter" && pin();
      const known = { tabindex: "0", "data-key": `largest ${rank}`, onclick: pin, onkeydown: keyed };
      return element("tr", known, element("td", {}, token(row.label), " → ", token(column.label)), numbers);
    });
    return card("Largest differences", table(["query → key", "A", "B", "B − A"], rows, { class: "largest" }));
  }

  // ---- outputs -------------------------------------------------------------------------------------------------------

  function outputs(views) {
    const [a, b] = views.map((view) => (view.output ?? "").split(/\s+/).filter(Boolean));
    const kept = common(a, b);
    const changed = a.length - kept.first.size + (b.length - kept.second.size);
    return card("Outputs", faint(changed ? "Words that the other does not have are marked." : "Both wrote the same."),
      element("div", { class: "pair" }, output(views[0], a, kept.first), output(views[1], b, kept.second)),
      sameRows(views, changed));
  }

  function output(view, words, kept) {
    const written = words.map((word, i) => [token(word, { class: kept.has(i) ? "" : "changed" }), " "]);
    return element("div", { class: "output" }, element("h3", {}, Regard.document.nameOf(view)),
      element("p", { class: "written", dir: "auto" }, written), faint(likelihood(view)));
  }

  function likelihood(view) {
    const known = Regard.predictions.own(view);
    const total = known.reduce((sum, one) => sum + one.chosen.log_prob, 0);
    return known.length > 0 && `log-probability of the ${known.length} tokens that its rows wrote: ${fixed(total, 4)}`;
  }

  /** Say so if the second model wrote another output but read that of the first. */
  function sameRows(views, changed) {
    const [a, b] = views.map((view) => (view.predictions ?? []).map((one) => one.chosen?.id).join());
    const said = "The rows below are the same tokens in both: B also read what A wrote, so that weights can be compared.";
    return Boolean(changed && a && a === b) && faint(said);
  }

  /** Return the places of the longest common subsequence in both. */
  function common(a, b) {
    const best = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
    for (let i = a.length - 1; i >= 0; i--) {
      for (let j = b.length - 1; j >= 0; j--) {
        best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
      }
    }
    const found = { first: new Set(), second: new Set() };
    for (let i = 0, j = 0; i < a.length && j < b.length;) {
      if (a[i] === b[j]) {
        found.first.add(i++);
        found.second.add(j++);
      } else if (best[i + 1][j] >= best[i][j + 1]) i++;
      else j++;
    }
    return found;
  }

  return { draw };
})();
