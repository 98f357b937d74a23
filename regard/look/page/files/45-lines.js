/**
 * Attention weights as lines: queries on the left, keys on the right; a larger weight has a stronger line.
 *
 * If tokens are pinned or under the pointer, only their lines are shown. Of many lines only the strongest are drawn.
 */
Regard.lines = (() => {
  const { element, svg, brief, visible, fixed } = Regard.dom;
  const { text, rowText, longest, sheet } = Regard.heat;
  const { ink } = Regard.colour;
  const MOST = 1500; // lines
  const LEAST = 0.01; // share of the strongest line that is worth drawing
  const BARS = 40;

  /** The options are those of a heat-map (40-heat.js). */
  function draw(matrix, options) {
    const sizes = measure(matrix, options.width);
    const most = Regard.state.now.scale === "one" ? 1 : Regard.matrix.most(matrix); // the weight of the strongest line
    const chosen = strongest(matrix, options.pins, LEAST * most);
    const lines = svg("g", {}, links(chosen, sizes));
    const tokens = () => [titles(options, sizes), ["r", "c"].map((axis) => tokensOf(matrix, axis, sizes, options))];
    const known = { class: "bipartite", role: "group", "aria-label": options.title };
    const drawn = svg("svg", { width: sizes.width, height: sizes.height, ...known }, lines, tokens());
    addListeners(drawn, lines, matrix, chosen, sizes, options);
    const picture = () => sheet(sizes.width, sizes.height, links(chosen, sizes), tokens());
    return { node: element("div", { class: "scroll" }, drawn), picture, note: noteOf(chosen) };
  }

  function measure(matrix, room) {
    const most = Math.max(matrix.rows.length, matrix.columns.length);
    const step = most > 64 ? 15 : 24;
    const [left, right] = [longest(matrix.rows, 110) + 16, longest(matrix.columns, 110) + 16];
    const between = Math.max(140, Math.min(420, room - left - right - 20));
    return { step, left, between, width: left + between + right, height: 44 + step * most };
  }

  const y = (i, sizes) => 44 + (i + 0.5) * sizes.step;

  /** Return the lines of pinned tokens, or all; the strongest last, so that they are drawn above the others. */
  function strongest(matrix, pins, least) {
    const wanted = (which, i) => !which.length || which.includes(i);
    const all = [];
    matrix.values.forEach((weight, i) => {
      const [r, c] = [Math.floor(i / matrix.columns.length), i % matrix.columns.length];
      if (weight > 0 && weight >= least && wanted(pins.rows, r) && wanted(pins.columns, c)) all.push([r, c, weight]);
    });
    all.sort((a, b) => a[2] - b[2]);
    return { links: all.slice(-MOST), left: Math.max(0, all.length - MOST), least };
  }

  function noteOf({ links: drawn, left, least }) {
    const cut = `${left} others are weaker than the ${drawn.length} that are drawn: pin a token to see all of its own.`;
    return `Weights below ${brief(least)} have no line. ${left ? cut : ""}`.trim();
  }

  function links({ links: chosen, least }, sizes, only = () => true) {
    const [x0, x1, bend] = [sizes.left, sizes.left + sizes.between, sizes.between / 2.4];
    return chosen.filter(([r, c]) => only(r, c)).map(([r, c, weight]) => {
      const [y0, y1] = [y(r, sizes), y(c, sizes)];
      const share = Math.min(1, (LEAST * weight) / least);
      const stroke = { "stroke-opacity": (0.08 + 0.87 * share).toFixed(3), "stroke-width": (0.6 + 4 * share).toFixed(2) };
      const d = `M${x0} ${y0}C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1} ${y1}`;
      return svg("path", { d, fill: "none", stroke: ink("accent"), ...stroke, "data-link": `${r},${c}` });
    });
  }

  function titles(options, sizes) {
    const faint = { fill: ink("faint") };
    return svg("g", {}, text(sizes.left - 8, 20, `query: ${options.queries}`, { ...faint, "text-anchor": "end" }),
      text(sizes.left + sizes.between + 8, 20, `key: ${options.keys}`, faint));
  }

  function tokensOf(matrix, axis, sizes, options) {
    const left = axis === "r";
    const [sides, pinned] = left ? [matrix.rows, options.pins.rows] : [matrix.columns, options.pins.columns];
    const x = left ? sizes.left - 8 : sizes.left + sizes.between + 8;
    return svg("g", { class: "axis" }, sides.map((side, i) => {
      const on = pinned.includes(i);
      const look = { fill: ink(on ? "mark" : side.special ? "faint" : "ink"), "font-weight": on ? 700 : undefined };
      const reached = { tabindex: "0", role: "button", "aria-pressed": String(on), "data-key": `line ${axis} ${i}` };
      const place = { "text-anchor": left ? "end" : "start", [`data-${axis}`]: i, ...reached };
      return text(x, y(i, sizes) + 4, rowText(side), { ...place, ...look });
    }));
  }

  function addListeners(drawn, lines, matrix, chosen, sizes, options) {
    const redraw = (only) => lines.replaceChildren(...links(chosen, sizes, only));
    const token = ({ target }) => target.closest("[data-r], [data-c]")?.dataset;
    const alone = (event) => {
      const over = token(event);
      if (over) redraw((r, c) => (over.r ? r === Number(over.r) : c === Number(over.c)));
    };
    const all = (event) => {
      Regard.dom.untip();
      if (token(event)) redraw();
    };
    for (const [name, run] of [["pointerover", alone], ["focusin", alone], ["pointerout", all], ["focusout", all]]) {
      drawn.addEventListener(name, run);
    }
    drawn.addEventListener("pointermove", (event) => {
      const link = event.target.dataset.link?.split(",").map(Number);
      if (link) Regard.dom.tip(event, options.describe(...link));
    });
    drawn.addEventListener("click", (event) => Regard.heat.pinLabel(event, matrix, options));
    drawn.addEventListener("keydown", (event) => event.key === "Enter" && Regard.heat.pinLabel(event, matrix, options));
  }

  /** A number for each token as bars; of many only the largest. */
  function bars(title, sides, values, rounded) {
    const order = [...values.keys()];
    const cut = order.length > BARS;
    if (cut) order.sort((a, b) => values[b] - values[a]).splice(BARS);
    const lines = order.map((i) => element("li", {},
      Regard.dom.token(sides[i].label, { class: "bar-name", title: visible(sides[i].label) }),
      Regard.dom.bar(values[i], fixed(values[i], rounded ? 3 : 4))));
    const sum = `${cut ? `The ${BARS} largest of ${values.length}; ` : ""}sum ${brief(values.reduce((a, b) => a + b, 0))}`;
    return element("div", { class: "bars" }, element("h3", {}, title), Regard.dom.faint(sum), element("ol", {}, lines));
  }

  return { draw, bars };
})();
