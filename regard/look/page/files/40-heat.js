/**
 * Heat-maps: rows are queries, columns are keys, and a cell's colour is a weight, or a difference of two.
 *
 * Up to 64 tokens a side every cell is a rectangle of an SVG. Above, the cells are one canvas with a pixel a cell, which the
 * browser enlarges; labels are SVG in both cases and stay visible when the map is scrolled.
 */
Regard.heat = (() => {
  const { element, svg, visible, shortened, brief } = Regard.dom;
  const { at, masked } = Regard.matrix;
  const { ink, css } = Regard.colour;
  const FEW = 64;
  const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
  const TILT = 60; // degrees of the labels above columns: 14 pixels apart they do not touch
  const visited = new Map(); // key of a map -> the focused cell, kept when the page is redrawn

  /**
   * @param matrix   values, rows, columns (35-matrix.js)
   * @param options  title; queries, keys: what the axes are; width: pixels to fill; zoom; colour, from, to, at, scaleText:
   *   its scale (25-colour.js); pins: {rows, columns}; onpin(axis, side), onhover(r, c), onpick(r, c); describe(r, c) -> lines;
   *   written(value) -> text inside large cells; key: under which the focus is kept
   * @returns node, and picture() -> the map as one SVG for export
   */
  function draw(matrix, options) {
    const sizes = measure(matrix, options);
    const { across, down } = sizes;
    const many = isLong(matrix);
    const inside = many ? canvas(matrix, options.colour, sizes) : framed(cells(matrix, options, sizes), across, down);
    const known = { tabindex: "0", role: "img", "data-key": options.key, "aria-label": spoken(matrix, options) };
    const style = boxed(0, 0, across, down);
    const stage = element("div", { class: "cells", style, ...known }, inside, marks(options, sizes));
    const part = (name, drawn, width, height) => element("div", { class: name }, framed(drawn, width, height, "axis"));
    const covered = `scroll-padding:${sizes.top + 2}px 2px 2px ${sizes.left + 2}px`; // by labels that stay visible
    const node = element("div", { class: "heat", style: `grid-template-columns:${sizes.left}px auto;${covered}` },
      part("heat-corner", axisOfRows(options, sizes), sizes.left, sizes.top),
      part("heat-top", columnLabels(matrix, options, sizes), across + sizes.spill, sizes.top),
      part("heat-left", rowLabels(matrix, options, sizes), sizes.left, down), stage);
    addListeners(node, stage, matrix, options, sizes);
    return { node, picture: () => picture(matrix, options, sizes, many ? inside : null) };
  }

  function isLong(matrix) {
    return Math.max(matrix.rows.length, matrix.columns.length) > FEW;
  }

  function spoken(matrix, { queries, keys }) {
    const size = `Heat-map of ${matrix.rows.length} queries (${queries}) by ${matrix.columns.length} keys (${keys}).`;
    return `${size} Arrow keys move from cell to cell, Enter pins a query, K a key.`;
  }

  // ---- sizes ---------------------------------------------------------------------------------------------------------

  const ruler = document.createElement("canvas").getContext("2d");

  function widthOf(text, size = 12) {
    ruler.font = `${size}px ${FONT}`;
    return ruler.measureText(text).width;
  }

  const label = (side) => shortened(visible(side.label), 18);
  const wrote = (side) => (side.wrote === undefined ? "" : ` → ${shortened(visible(side.wrote), 14)}`);

  function longest(sides, least) {
    return Math.ceil(sides.reduce((most, side) => Math.max(most, widthOf(label(side) + wrote(side))), least));
  }

  /** Return as much of a text as fits. */
  function fitting(said, room) {
    let most = [...said].length;
    while (most > 1 && widthOf(shortened(said, most)) > room) most--;
    return shortened(said, most);
  }

  function measure(matrix, options) {
    const left = longest(matrix.rows, Math.max(60, Math.min(140, widthOf(options.queries)))) + 18;
    const [tall, tilt] = [longest(matrix.columns, 24), (TILT * Math.PI) / 180];
    const top = Math.ceil(tall * Math.sin(tilt)) + 42;
    const spill = Math.ceil(tall * Math.cos(tilt)) + 14; // how far the last label leans over the edge
    const cell = cellSize(matrix, options.width - left - spill) * (options.zoom ?? 1);
    return { left, top, spill, cell, across: cell * matrix.columns.length, down: cell * matrix.rows.length };
  }

  function cellSize(matrix, room) {
    const fits = room / Math.max(1, matrix.columns.length);
    if (isLong(matrix)) return Math.max(1, Math.min(14, fits >= 2 ? Math.floor(fits) : Math.floor(fits * 4) / 4));
    return Math.max(14, Math.min(matrix.rows.length > 24 ? 26 : 40, Math.floor(fits)));
  }

  // ---- parts: each is a <g>, on the page and in exported pictures ----------------------------------------------------

  function framed(part, width, height, name) {
    return svg("svg", { width, height, class: name, viewBox: `0 0 ${width} ${height}`, overflow: "visible" }, part);
  }

  /** A picture with its own background that does not need the style sheet. */
  function sheet(width, height, ...children) {
    const known = { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` };
    return svg("svg", known, svg("rect", { width, height, fill: ink("card") }), children);
  }

  function text(x, y, said, more = {}) {
    return svg("text", { x, y, "font-size": 12, "font-family": FONT, fill: ink("ink"), ...more }, said);
  }

  /** Return n so that every n-th label fits; up to 64 tokens all do. */
  const stepOf = (cell, room) => (cell >= 14 ? 1 : Math.ceil(room / cell));

  function look(pinned, side) {
    return pinned ? { fill: ink("mark"), "font-weight": 700 } : side.special ? { fill: ink("faint") } : {};
  }

  /** The label of a row: the token that was read, and the one that its step wrote. */
  function rowText(side) {
    return [label(side), side.wrote !== undefined && svg("tspan", { fill: ink("faint"), "font-weight": 400 }, wrote(side))];
  }

  function columnLabels(matrix, options, sizes) {
    const labels = matrix.columns.map((side, c) => {
      const x = (c + 0.5) * sizes.cell + 3;
      const turned = { transform: `rotate(${-TILT} ${x} ${sizes.top - 8})`, "data-c": c };
      return text(x, sizes.top - 8, label(side), { ...turned, ...look(options.pins?.columns.includes(c), side) });
    });
    const title = text(0, 14, `key: ${options.keys} →`, { fill: ink("faint") });
    return svg("g", {}, title, labels.filter((_, c) => c % stepOf(sizes.cell, 18) === 0));
  }

  function rowLabels(matrix, options, sizes) {
    const labels = matrix.rows.map((side, r) => {
      const place = { "text-anchor": "end", "data-r": r, ...look(options.pins?.rows.includes(r), side) };
      return text(sizes.left - 9, (r + 0.5) * sizes.cell + 4, rowText(side), place);
    });
    return svg("g", {}, labels.filter((_, r) => r % stepOf(sizes.cell, 14) === 0));
  }

  function axisOfRows(options, sizes) {
    const lines = ["query:", fitting(options.queries, sizes.left - 18), "↓"];
    const look_ = { "text-anchor": "end", fill: ink("faint") };
    return svg("g", {}, lines.map((line, i) => text(sizes.left - 9, sizes.top - 38 + 15 * i, line, look_)));
  }

  function cells(matrix, options, sizes) {
    const cell = (r, c) => (masked(matrix, r, c) ? hole(r, c, sizes.cell) : filled(matrix, r, c, options, sizes.cell));
    return svg("g", {}, matrix.rows.map((_, r) => svg("g", {}, matrix.columns.map((_, c) => cell(r, c)))));
  }

  function filled(matrix, r, c, options, cell) {
    const gap = cell >= 12 ? 1 : 0;
    const rgb = options.colour(at(matrix, r, c));
    const size = { x: c * cell, y: r * cell, width: cell - gap, height: cell - gap, rx: gap && 1.5 };
    const box = svg("rect", { ...size, fill: css(rgb), "data-cell": `${r},${c}` });
    return cell >= 34 && options.written ? [box, number(matrix, r, c, cell, rgb, options)] : box;
  }

  function number(matrix, r, c, cell, rgb, options) {
    const more = { "text-anchor": "middle", "font-size": 10.5, fill: Regard.colour.over(rgb), "pointer-events": "none" };
    return text((c + 0.5) * cell, (r + 0.5) * cell + 4, options.written(at(matrix, r, c)), more);
  }

  /** A masked key is not a weight of 0: it has a dot instead of a colour. */
  function hole(r, c, cell) {
    const middle = { cx: (c + 0.5) * cell, cy: (r + 0.5) * cell, r: 1 };
    return svg("circle", { ...middle, fill: ink("line"), "data-masked": `${r},${c}` });
  }

  /** Draw one pixel per cell; masked cells stay transparent. */
  function canvas(matrix, colour, sizes) {
    const [height, width] = [matrix.rows.length, matrix.columns.length];
    const drawn = element("canvas", { width, height, style: boxed(0, 0, sizes.across, sizes.down) });
    const pixels = new ImageData(width, height);
    for (let r = 0, i = 0; r < height; r++) {
      for (let c = 0; c < width; c++, i++) if (!masked(matrix, r, c)) dye(pixels.data, i, colour(matrix.values[i]));
    }
    drawn.getContext("2d").putImageData(pixels, 0, 0);
    return drawn;
  }

  function dye(data, i, rgb) {
    data[4 * i] = rgb[0];
    data[4 * i + 1] = rgb[1];
    data[4 * i + 2] = rgb[2];
    data[4 * i + 3] = 255;
  }

  /** Pinned rows and columns, and the cell under the pointer, as frames above the cells. */
  function marks({ pins = { rows: [], columns: [] } }, { cell, across, down }) {
    const frame = (x, y, width, height) => element("div", { class: "pin", style: boxed(x, y, width, height) });
    const rows = pins.rows.map((r) => frame(0, r * cell, across, cell));
    const columns = pins.columns.map((c) => frame(c * cell, 0, cell, down));
    return [rows, columns, element("div", { class: "cursor", hidden: "" })];
  }

  const boxed = (x, y, width, height) => `left:${x}px;top:${y}px;width:${width}px;height:${height}px`;

  // ---- pointer and keys ----------------------------------------------------------------------------------------------

  function addListeners(node, stage, matrix, options, { cell }) {
    const cursor = stage.querySelector(".cursor");
    let place = visited.get(options.key);
    const move = (r, c) => {
      place = [within(r, matrix.rows), within(c, matrix.columns)];
      visited.set(options.key, place);
      cursor.style.cssText = boxed(place[1] * cell, place[0] * cell, cell, cell);
      cursor.hidden = false;
      options.onhover?.(...place);
    };
    const step = (r, c) => {
      move(r, c);
      cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
    };
    stage.addEventListener("focus", () => place && step(...place));
    stage.addEventListener("pointermove", (event) => {
      const box = stage.getBoundingClientRect();
      move(Math.floor((event.clientY - box.top) / cell), Math.floor((event.clientX - box.left) / cell));
      Regard.dom.tip(event, options.describe(...place));
    });
    stage.addEventListener("pointerleave", () => { cursor.hidden = true; Regard.dom.untip(); });
    stage.addEventListener("click", () => place && pick(place, matrix, options));
    stage.addEventListener("keydown", (event) => keyed(event, place ?? [0, -1], step, matrix, options));
    node.addEventListener("click", (event) => pinLabel(event, matrix, options));
  }

  const within = (i, sides) => Math.min(sides.length - 1, Math.max(0, i));

  function keyed(event, [r, c], move, matrix, options) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (step) move(r + step[0], c + step[1]);
    else if (event.key === "Enter") pick([within(r, matrix.rows), within(c, matrix.columns)], matrix, options);
    else if (event.key.toLowerCase() === "k") options.onpin("keys", matrix.columns[within(c, matrix.columns)]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** A click on a cell, or Enter, pins its query. */
  function pick([r, c], matrix, options) {
    options.onpin("queries", matrix.rows[r]);
    options.onpick?.(r, c);
  }

  /** A click on a label pins its token. */
  function pinLabel({ target }, matrix, options) {
    const { r, c } = target.closest("[data-r], [data-c]")?.dataset ?? {};
    if (r) options.onpin("queries", matrix.rows[r]);
    if (c) options.onpin("keys", matrix.columns[c]);
  }

  // ---- export --------------------------------------------------------------------------------------------------------

  function picture(matrix, options, sizes, drawn) {
    const { left, top, across, down, spill } = sizes;
    const moved = (x, y, part) => svg("g", { transform: `translate(${x} ${y})` }, part);
    const width = Math.max(left + across + spill, left + 140 + widthOf(options.scaleText, 11)) + 12;
    return sheet(width, top + down + 84,
      text(12, 22, options.title, { "font-size": 14, "font-weight": 600 }),
      moved(0, 34, axisOfRows(options, sizes)), moved(left, 34, columnLabels(matrix, options, sizes)),
      moved(0, 34 + top, rowLabels(matrix, options, sizes)),
      moved(left, 34 + top, drawn ? enlarged(drawn, sizes) : cells(matrix, options, sizes)),
      moved(left, 46 + top + down, scale(options)));
  }

  /** The canvas as an image, each of its pixels some whole pixels wide so that no viewer blurs it. */
  function enlarged(drawn, { cell, across, down }) {
    const times = Math.max(1, Math.min(8, Math.round(cell)));
    const large = element("canvas", { width: drawn.width * times, height: drawn.height * times });
    const context = large.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(drawn, 0, 0, large.width, large.height);
    const href = large.toDataURL("image/png");
    return svg("image", { width: across, height: down, href, style: "image-rendering:pixelated" });
  }

  /** The legend: a bar from the smallest to the largest value, and the name of the scale. */
  function scale({ colour, from, to, at: valueAt, scaleText }) {
    const steps = 60;
    const bits = Array.from({ length: steps }, (_, i) => {
      const fill = css(colour(valueAt((i + 0.5) / steps)));
      return svg("rect", { x: 2 * i, width: 2.2, height: 10, fill });
    });
    const end = (x, value, anchor) => text(x, 24, brief(value), { "text-anchor": anchor, "font-size": 11 });
    const said = text(2 * steps + 12, 9.5, scaleText, { "font-size": 11, fill: ink("faint") });
    return svg("g", {}, bits, end(0, from, "start"), end(2 * steps, to, "end"), said);
  }

  function legend(options) {
    const said = `Colour scale from ${brief(options.from)} to ${brief(options.to)}: ${options.scaleText}`;
    const drawn = framed(scale(options), 136 + widthOf(options.scaleText, 11), 28, "scale");
    return element("div", { class: "legend", role: "img", "aria-label": said }, drawn);
  }

  return { draw, legend, isLong, sheet, text, widthOf, longest, rowText, pinLabel, dye };
})();
