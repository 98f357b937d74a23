/** The Beam tree tab: every hypothesis that was kept at each step, and the one that was returned. */
Regard.tree = (() => {
  const { element, svg, controls, card, faint, visible, shortened, fixed } = Regard.dom;
  const { text, widthOf, sheet } = Regard.heat;
  const { ink } = Regard.colour;
  const [TALL, GAP] = [40, 30]; // height of a node, and gap between steps

  function draw(view) {
    const { steps } = view.tree;
    const drawn = tree(steps);
    drawn.addEventListener("pointermove", (event) => point(event, steps));
    drawn.addEventListener("pointerleave", Regard.dom.untip);
    return element("div", {}, controls(Regard.attention.viewChooser()), card("Beam search", faint(explain(steps)),
      element("div", { class: "scroll", tabindex: "0", "data-key": "tree" }, drawn),
      Regard.export.buttons("beam tree", { csv: () => csv(steps), picture: () => tree(steps) })));
  }

  function explain(steps) {
    const ended = steps.flat().filter((node) => node.ended).length;
    return `${steps.length} steps, at most ${widest(steps)} hypotheses at a time, ${ended} ended (a double frame).
      A number is the log-probability of the whole hypothesis so far; the thick path is the one that was chosen.`;
  }

  const widest = (steps) => Math.max(...steps.map((step) => step.length));

  function tree(steps) {
    const columns = columnsOf(steps);
    const { x, width } = columns.at(-1);
    const each = (make) => steps.flatMap((step, s) => step.map((node, i) => make(node, s, i, columns)));
    const look = { "text-anchor": "middle", "font-size": 11, fill: ink("faint") };
    const number = (column, s) => text(column.x + column.width / 2, 14, String(s), look);
    const edges = each(edge).filter(Boolean).sort((a, b) => a.dataset.best - b.dataset.best); // the chosen path on top
    return sheet(x + width + 20, widest(steps) * (TALL + 14) + 30, columns.map(number), edges, each(nodeBox));
  }

  /** A column for each step, as wide as its widest token. */
  function columnsOf(steps) {
    let x = 10;
    return steps.map((step) => {
      const width = Math.max(54, ...step.map((node) => widthOf(name(node)) + 18));
      const column = { x, width };
      x += width + GAP;
      return column;
    });
  }

  const name = (node) => shortened(visible(node.piece), 16);
  const y = (i) => 26 + i * (TALL + 14);

  function nodeBox(node, s, i, columns) {
    const { x, width } = columns[s];
    const stroke = { stroke: ink(node.best ? "mark" : "line"), "stroke-width": node.best ? 2 : 1 };
    const box = (inset) => {
      const size = { x: x + inset, y: y(i) + inset, width: width - 2 * inset, height: TALL - 2 * inset, rx: 6 - inset };
      return svg("rect", { ...size, fill: ink("paper"), ...stroke });
    };
    const middle = { "text-anchor": "middle", "pointer-events": "none" };
    return svg("g", { "data-node": `${s},${i}`, "data-best": Number(node.best) }, box(0), node.ended && box(3),
      text(x + width / 2, y(i) + 17, name(node), { ...middle, "font-weight": node.best ? 700 : undefined }),
      text(x + width / 2, y(i) + 32, fixed(node.log_prob, 2), { ...middle, "font-size": 10.5, fill: ink("faint") }));
  }

  function edge(node, s, i, columns) {
    if (s === 0 || typeof node.parent !== "number") return null;
    const [x0, x1] = [columns[s - 1].x + columns[s - 1].width, columns[s].x];
    const [y0, y1] = [y(node.parent) + TALL / 2, y(i) + TALL / 2];
    const stroke = { stroke: ink(node.best ? "mark" : "faint"), "stroke-width": node.best ? 3 : 1 };
    const d = `M${x0} ${y0}C${x0 + 16} ${y0} ${x1 - 16} ${y1} ${x1} ${y1}`;
    return svg("path", { d, fill: "none", ...stroke, "data-edge": `${s},${i}`, "data-best": Number(node.best) });
  }

  /** Return the tokens that lead to a node. */
  function wayTo(steps, s, i) {
    const way = [];
    for (let place = i; s >= 0 && typeof place === "number"; s--) {
      way.unshift(visible(steps[s][place].piece));
      place = steps[s][place].parent;
    }
    return way.join(" ");
  }

  function point(event, steps) {
    const at = event.target.closest("[data-node]")?.dataset.node.split(",").map(Number);
    if (!at) return Regard.dom.untip();
    const node = steps[at[0]][at[1]];
    const more = [node.ended && "ended", node.best && "on the chosen path"].filter(Boolean);
    return Regard.dom.tip(event, [element("bdi", {}, wayTo(steps, ...at)), `log-probability ${fixed(node.log_prob, 4)}`,
      [`token ${node.token}`, ...more].join(", ")]);
  }

  function csv(steps) {
    const rows = steps.flatMap((step, s) => step.map((node, i) =>
      [s, i, node.parent ?? "", node.token, node.piece, node.log_prob, Number(node.ended), Number(node.best)]));
    return Regard.export.csv([["step", "hypothesis", "parent", "token", "piece", "log_prob", "ended", "best"], ...rows]);
  }

  return { draw };
})();
