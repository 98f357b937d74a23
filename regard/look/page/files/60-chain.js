/**
 * The Chain tab: all activations of one token, from its embedding to the candidates for the next token.
 *
 * Token, id, embedding, position; in the chosen layer query, key, value, scores, softmax, mix, heads side by side, output
 * projection, residual sum, norm, feed-forward; the other layers in one line each; at last the candidates for the
 * next token.
 */
Regard.chain = (() => {
  const { element, button, controls, faint, table, token, choice, brief, exact, fixed, bar } = Regard.dom;
  const { array, slice, MASKED } = Regard.document;
  const { now, change, MEAN } = Regard.state;
  const KEYS = 24; // rows of the table of scores, at most
  const SUBLAYERS = { self: "self-attention", cross: "cross-attention", ff: "feed-forward" };
  const NAMES = {
    input: "input of the layers", mix: "heads side by side", residual: "residual sum", inner: "inner activation",
    final: "final norm",
  };
  const RECURRENT = { query: "decoder's state", mix: "context" };

  async function draw(view) {
    const walk = walkOf(view);
    const mean = now.head === MEAN ? " The mean has no vectors of its own, so this is head 0." : "";
    const { viewChooser, chooser } = Regard.attention;
    return element("div", {}, controls(viewChooser(), chooser(view)), tokenChooser(view, walk),
      faint(`One token's way through the model, layer ${walk.layer} in full, head ${walk.head}.${mean} `,
        "Point at a strip for its numbers: blue is negative, orange positive, each strip to its own largest. ",
        "Formulas leave biases and gates out."),
      element("ol", { class: "chain" }, await stepsOf(view, walk)),
      Regard.export.buttons(`chain of token ${walk.place}`, { csv: () => csv(walk) }));
  }

  /** Return the chosen token with its sequence, layer and head. */
  function walkOf(view) {
    const asked = Regard.document.layerOf(view, now.kind, now.layer)?.queries;
    const strip = view.chain.some((item) => item.strip === asked) ? asked : view.chain[0].strip;
    const items = view.chain.filter((item) => item.strip === strip && isOwn(item));
    const stored = items.reduce((kept, item) => kept.filter((place) => item.tokens.includes(place)), items[0].tokens);
    const place = now.queries.filter((one) => stored.includes(one)).at(-1) ?? stored[0];
    return { strip, items, stored, place, layer: now.layer, head: Math.max(0, now.head) };
  }

  /** Keys and values of cross-attention belong to the source, but are no step of its encoder: they are shown with the scores. */
  const isOwn = (item) => !(item.sublayer === "cross" && ["key", "value"].includes(item.stage));

  function tokenChooser(view, walk) {
    const strip = view.strips[walk.strip];
    const left = strip.ids.length - walk.stored.length;
    const one = (place) => {
      const onclick = () => change({ queries: [place] });
      return choice(token(strip.pieces[place]), place === walk.place, onclick, `token ${place}`);
    };
    return element("div", { class: "controls tokens", role: "group", "aria-label": "Token" },
      element("span", { class: "label" }, `Token of ${strip.label}`), walk.stored.map(one),
      left > 0 && element("span", { class: "faint" }, `vectors of ${left} others are left out, for size`));
  }

  // ---- steps, in the order in which they happen ----------------------------------------------------------------------

  async function stepsOf(view, walk) {
    const groups = byLayer(walk.items);
    const steps = await Promise.all(groups.map((items) => {
      const near = items[0].layer === null || items[0].layer === walk.layer;
      return near ? Promise.all(items.map((item) => inFull(view, walk, item))) : passed(walk, items);
    }));
    return [tokenStep(view, walk), steps, candidates(view, walk)];
  }

  /** Group consecutive steps of one layer. */
  function byLayer(items) {
    const groups = [];
    for (const item of items) {
      if (groups.at(-1)?.[0].layer === item.layer) groups.at(-1).push(item);
      else groups.push([item]);
    }
    return groups;
  }

  function tokenStep(view, walk) {
    const strip = view.strips[walk.strip];
    const id = element("strong", {}, String(strip.ids[walk.place]));
    const said = element("p", {}, token(strip.pieces[walk.place], { class: "large" }), ` place ${walk.place}, id `, id);
    return step("token → id", "", said, { stage: "token" });
  }

  async function inFull(view, walk, item) {
    const values = await vector(item, walk.place);
    const scores = item.stage === "mix" ? await scoresStep(view, walk, item) : null;
    const names = view.kind === "alignment" ? RECURRENT : NAMES;
    const said = item.stage === "input" ? await inputFormula(walk, values) : formula(view, walk, item, values.length);
    return [scores, step(names[item.stage] ?? item.stage, said, strips(item, values, walk), item)];
  }

  /** A layer that is not chosen: the residual stream after it, and a button that chooses it. */
  async function passed(walk, items) {
    const { layer } = items[0];
    const last = items.filter((item) => ["residual", "norm"].includes(item.stage)).at(-1) ?? items.at(-1);
    const open = button("look into it", () => change({ layer }));
    const values = await vector(last, walk.place);
    return step(`layer ${layer}`, "", element("div", { class: "passing" }, strip(values), open), { stage: "passed" });
  }

  function step(title, said, body, { stage, layer = null, sublayer = null }) {
    const where = layer === null ? "" : `layer ${layer} · ${SUBLAYERS[sublayer] ?? sublayer}`;
    const known = { "data-stage": stage, "data-sublayer": sublayer, "data-layer": layer };
    return element("li", { class: stage === "passed" ? "step passed" : "step", ...known },
      element("div", { class: "step-name" }, element("strong", {}, title), element("span", { class: "faint" }, where)),
      element("div", { class: "step-body" }, said && element("code", { class: "formula" }, said), body));
  }

  async function vector(item, place) {
    return slice(await array(item.values), item.tokens.indexOf(place));
  }

  const isBeside = (one, item) => one.layer === item.layer && one.sublayer === item.sublayer;

  /** The formula of a step, with the sizes of this model. */
  function formula(view, walk, item, size) {
    const { stage, sublayer, heads } = item;
    const { d_model: wide = "d", d_ff: inner = "d_ff", "embedding scale": times = 1 } = view.model ?? {};
    const row = `e = E[id]${times === 1 ? "" : ` × ${brief(times)}`}    id → ${size}`;
    const mix = walk.items.find((one) => one.stage === "mix" && isBeside(one, item))?.values.shape[1] ?? "mix";
    const projected = (name) => `${name} = x W_${name}    ${wide} → ${heads} × ${size / heads}`;
    const lines = {
      embedding: view.kind === "picture" ? `e = pixels W    patch → ${size}` : row,
      position: `p    ${size}`,
      norm: `norm(x)    ${size}`,
      query: projected("q"), key: projected("k"), value: projected("v"),
      mix: `Σ_j a_j v_j of each head, side by side    ${heads} × ${size / heads} = ${size}`,
      inner: `h = f(x W_1)    ${wide} → ${size}`,
      output: sublayer === "ff" ? `y = h W_2    ${inner} → ${size}` : `y = mix W_o    ${mix} → ${size}`,
      residual: `x ← x + y    ${size}`,
      final: `norm(x)    ${size}`,
    };
    const recurrent = { query: `s, as it is compared    ${size}`, mix: `c = Σ_j a_j v_j    ${size}` };
    return (view.kind === "alignment" ? recurrent : lines)[stage] ?? String(size);
  }

  /** Where a model does more than add, a note says so. */
  async function inputFormula(walk, x) {
    const parts = walk.items.filter((item) => ["embedding", "position"].includes(item.stage));
    const vectors = await Promise.all(parts.map((item) => vector(item, walk.place)));
    const [most, off] = x.reduce(([largest, furthest], value, i) => {
      const sum = vectors.reduce((total, one) => total + one[i], 0);
      return [Math.max(largest, Math.abs(value)), Math.max(furthest, Math.abs(value - sum))];
    }, [0, 0]);
    const sum = parts.map((item) => item.stage[0]).join(" + ");
    return `x = ${off <= 0.01 * most ? sum : `norm(${sum} + …)`}    ${x.length}`;
  }

  // ---- vectors as colours --------------------------------------------------------------------------------------------

  /** Vectors of concatenated heads: the chosen head, and its place among all. */
  function strips(item, values, walk) {
    if ((item.heads ?? 1) === 1) return strip(values);
    const { from, to } = headIn(item, values.length, walk.head);
    const marked = [from / values.length, to / values.length];
    return element("div", {}, strip(values.subarray(from, to), { name: `head ${walk.head}` }),
      element("div", { class: "whole" }, strip(values, { marked, name: "all heads" })));
  }

  /** Return the range of a head; with grouped keys and values, that of its group. */
  function headIn(item, size, head) {
    const layer = Regard.document.layerOf(Regard.document.views[now.view], now.kind, now.layer);
    const heads = Math.max(item.heads, layer?.heads ?? 1);
    const [place, each] = [Math.floor((head * item.heads) / heads), size / item.heads];
    return { from: place * each, to: (place + 1) * each };
  }

  /** A vector as a row of colours, with its norm. */
  function strip(values, { marked = null, name = "", small = false } = {}) {
    const most = values.reduce((found, x) => Math.max(found, Math.abs(x)), 0);
    const norm = Math.sqrt(values.reduce((sum, x) => sum + x * x, 0));
    const said = `${name && `${name}: `}‖·‖ = ${brief(norm)}, largest ±${brief(most)}`;
    return element("div", { class: small ? "strip small" : "strip" },
      element("div", { class: "strip-colours" }, painted(values, most, name), marked && frame(...marked)),
      !small && element("span", { class: "faint" }, said));
  }

  function frame(from, to) {
    return element("span", { class: "mark", style: `left:${100 * from}%;width:${100 * (to - from)}%` });
  }

  function painted(values, most, name) {
    const said = `${name || "vector"}, ${values.length} numbers`;
    const canvas = element("canvas", { width: values.length, height: 1, role: "img", "aria-label": said });
    const { colour } = Regard.colour.signed(most);
    const pixels = new ImageData(values.length, 1);
    values.forEach((value, i) => Regard.heat.dye(pixels.data, i, colour(value)));
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    canvas.addEventListener("pointermove", (event) => {
      const { left, width } = canvas.getBoundingClientRect();
      const i = Math.min(values.length - 1, Math.max(0, Math.floor(((event.clientX - left) / width) * values.length)));
      const where = `${name && `${name}, `}dimension ${i} of ${values.length}`;
      Regard.dom.tip(event, [where, element("strong", {}, exact(values[i]))]);
    });
    canvas.addEventListener("pointerleave", Regard.dom.untip);
    return canvas;
  }

  // ---- scores against every key --------------------------------------------------------------------------------------

  async function scoresStep(view, walk, item) {
    const across = ["cross", "alignment"];
    const attention = view.attention.find((one) => one.queries === walk.strip && one.layer === item.layer
      && across.includes(one.kind) === (item.sublayer === "cross"));
    if (!attention) return null;
    const parts = await partsOf(view, walk, item, attention);
    const count = parts.weights.length;
    const order = [...parts.weights.keys()];
    if (count > KEYS) order.sort((a, b) => parts.weights[b] - parts.weights[a]).splice(KEYS);
    const columns = columnsOf(view.strips[attention.keys], parts);
    const rows = order.map((place) => element("tr", {}, columns.map(([, cell]) => cell(place))));
    const body = element("div", { class: "scroll" }, table(columns.map(([name]) => name), rows, { class: "scores" }),
      count > KEYS && faint(`The ${KEYS} largest weights of ${count} keys.`));
    const said = `a = softmax over ${count} keys`;
    return step(`scores and softmax, head ${walk.head}`, said, body, { ...item, stage: "scores" });
  }

  /** Return what is stored for the table of one query: query, keys, values, scores and weights. */
  async function partsOf(view, walk, item, attention) {
    const { head, place } = walk;
    const width = view.strips[attention.keys].ids.length;
    const rowOf = async (blob) => blob && slice(await array(blob), head).subarray(place * width, (place + 1) * width);
    const beside = view.chain.filter((one) => isBeside(one, item));
    const find = (stage, strip_) => beside.find((one) => one.stage === stage && one.strip === strip_);
    const vectors = (stage, strip_) => headsOf(find(stage, strip_), head);
    const query = (await vectors("query", walk.strip))(place);
    return {
      query, key: await vectors("key", attention.keys), value: await vectors("value", attention.keys),
      weights: await rowOf(attention.weights), scores: await rowOf(attention.scores),
      dots: attention.kind !== "alignment", // other score functions are no dot products
      scale: attention.scale ?? 1 / Math.sqrt(query?.length ?? 1),
    };
  }

  /** Return a function from places to vectors of one head; null where a vector is not stored. */
  async function headsOf(item, head) {
    if (!item) return () => null;
    const stored = await array(item.values);
    const { from, to } = headIn({ heads: item.heads ?? 1 }, stored.size, head);
    return (place) => (item.tokens.includes(place) ? slice(stored, item.tokens.indexOf(place)).subarray(from, to) : null);
  }

  /** Return [name, place of a key -> cell] of each column for which there are numbers. */
  function columnsOf(keys, { query, key, value, dots, scale, weights, scores }) {
    const cell = (said) => element("td", { class: "number" }, said);
    const picture = (values, name) => element("td", {}, values ? strip(values, { small: true, name }) : "–");
    const masked = (place) => scores[place] < MASKED;
    const product = (place, times) => {
      const other = key(place);
      return cell(other && query ? brief(times * other.reduce((sum, x, i) => sum + x * query[i], 0)) : "–");
    };
    return [
      ["key", (place) => element("th", { scope: "row" }, token(keys.pieces[place]))],
      ["k", (place) => picture(key(place), "key")],
      dots && ["q·k", (place) => product(place, 1)],
      dots && [scaledBy(scale), (place) => product(place, scale)],
      scores && [dots ? "+ positions, mask" : "score", (place) => cell(masked(place) ? "masked" : brief(scores[place]))],
      ["softmax: a", (place) => cell(bar(weights[place], fixed(weights[place], 4)))],
      ["v", (place) => picture(value(place), "value")],
    ].filter(Boolean);
  }

  /** Return the factor of the dot products, usually one over a square root. */
  function scaledBy(scale) {
    if (scale === 1) return "not scaled";
    const squared = 1 / scale ** 2;
    const whole = Math.round(squared);
    return Math.abs(squared - whole) < 1e-3 * squared ? `÷ √${whole}` : `× ${brief(scale)}`;
  }

  // ---- predictions ---------------------------------------------------------------------------------------------------

  function candidates(view, walk) {
    const found = Regard.document.predictionOf(view, walk.strip, walk.place);
    const bars = found && Regard.predictions.candidates(found);
    return found && step("logits → candidates", "p = softmax(logits) over the vocabulary", bars, { stage: "logits" });
  }

  /** Return every vector of this token, with its stage. */
  async function csv(walk) {
    const line = async (item) => [item.layer ?? "", item.sublayer ?? "", item.stage, ...(await vector(item, walk.place))];
    const rows = await Promise.all(walk.items.map(line));
    return Regard.export.csv([["layer", "sublayer", "stage", "values"], ...rows]);
  }

  return { draw };
})();
