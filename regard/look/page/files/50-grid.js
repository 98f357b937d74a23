/**
 * Small pictures of all layers and heads of a kind; a click chooses one.
 *
 * The weights of a layer are inflated when its row becomes visible, and drawn when the browser is idle.
 */
Regard.grid = (() => {
  const { element, svg, choice } = Regard.dom;
  const { text, sheet, dye } = Regard.heat;
  const { now, MEAN } = Regard.state;
  const idle = (run) => (window.requestIdleCallback ? requestIdleCallback(run, { timeout: 50 }) : setTimeout(run, 1));

  /** size: pixels of one small picture. */
  function draw(view, kind, size, onchoose) {
    const layers = Regard.document.layersOf(view, kind);
    const heads = Math.max(...layers.map((layer) => layer.heads));
    const across = Array.from({ length: heads }, (_, head) => element("span", { class: "thumb-head" }, String(head)));
    const rows = layers.map((layer) => rowOf(view, layer, size, onchoose));
    const style = `grid-template-columns:auto repeat(${heads}, max-content)`;
    const name = `All heads of ${Regard.document.KINDS[kind]}`;
    const table = element("div", { class: "thumbs", role: "group", "aria-label": name, style }, element("span"), across,
      rows.map((row) => row.nodes));
    return { node: element("div", { class: "scroll" }, table), picture: () => picture(rows, heads, size, name) };
  }

  function rowOf(view, layer, size, onchoose) {
    const number = layer.layer;
    const canvases = Array.from({ length: layer.heads }, () => element("canvas", shape(view, layer, size)));
    const buttons = canvases.map((canvas, head) => {
      const said = `layer ${number}, head ${head}`;
      const on = now.layer === number && [head, MEAN].includes(now.head);
      const more = { class: "thumb", title: said, "aria-label": said };
      return choice(canvas, on, () => onchoose(number, head), `thumb ${number} ${head} ${size}`, more);
    });
    const name = element("span", { class: "thumb-layer" }, String(number));
    let painted = null;
    const paintAll = () => (painted ??= paintRow(view, layer, canvases));
    whenSeen(name, () => idle(paintAll));
    return { nodes: [name, ...buttons, fillers(view, layer)], number, canvases, paintAll };
  }

  /** Layers may have fewer heads than others. */
  function fillers(view, layer) {
    const most = Math.max(...Regard.document.layersOf(view, layer.kind).map((one) => one.heads));
    return Array.from({ length: most - layer.heads }, () => element("span"));
  }

  /** Return a size in proportion to the numbers of queries and keys, at most twice as high as wide. */
  function shape(view, layer, size) {
    const ratio = view.strips[layer.queries].ids.length / view.strips[layer.keys].ids.length;
    const [width, height] = ratio > 1 ? [size / Math.min(ratio, 2), size] : [size, size * Math.max(ratio, 0.5)];
    return { width: Math.round(width), height: Math.round(height) };
  }

  function whenSeen(node, run) {
    const watcher = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      run();
    }, { rootMargin: "200px" });
    watcher.observe(node);
  }

  async function paintRow(view, layer, canvases) {
    for (const [head, canvas] of canvases.entries()) {
      if (!canvas.isConnected) return; // the page has been redrawn
      const matrix = await Regard.matrix.shown(view, layer, head, now);
      if (matrix.columns.length) paint(canvas, matrix);
      await new Promise((done) => idle(done));
    }
  }

  /** Draw the largest weight under each pixel, so that a single large weight stays visible. */
  function paint(canvas, matrix) {
    const { width, height } = canvas;
    const { colour } = Regard.colour.weights(Regard.matrix.most(matrix), "this head");
    const pixels = new ImageData(width, height);
    for (let y = 0; y < height; y++) {
      const [r0, r1] = under(y, height, matrix.rows.length);
      for (let x = 0; x < width; x++) {
        const [c0, c1] = under(x, width, matrix.columns.length);
        if (hidden(matrix, r0, r1, c0, c1)) continue;
        dye(pixels.data, y * width + x, colour(largest(matrix, r0, r1, c0, c1)));
      }
    }
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    canvas.dataset.drawn = "1";
  }

  /** Return the range of cells under a pixel, without its end. */
  function under(pixel, pixels, cells) {
    const from = Math.floor((pixel * cells) / pixels);
    return [from, Math.max(from + 1, Math.floor(((pixel + 1) * cells) / pixels))];
  }

  /** Return whether all cells under a pixel are masked. */
  function hidden(matrix, r0, r1, c0, c1) {
    for (let r = r0; r < r1; r++) {
      for (let c = c0; c < c1; c++) if (!Regard.matrix.masked(matrix, r, c)) return false;
    }
    return true;
  }

  function largest(matrix, r0, r1, c0, c1) {
    const width = matrix.columns.length;
    let most = 0;
    for (let r = r0; r < r1; r++) {
      for (let i = r * width + c0; i < r * width + c1; i++) if (matrix.values[i] > most) most = matrix.values[i];
    }
    return most;
  }

  async function picture(rows, heads, size, name) {
    await Promise.all(rows.map((row) => row.paintAll()));
    const step = size + 8;
    const middle = { "text-anchor": "middle" };
    const drawn = rows.map(({ number, canvases }, r) => [
      text(34, 60 + r * step + size / 2, String(number), middle),
      canvases.map((canvas, c) => svg("image", {
        x: 48 + c * step, y: 56 + r * step, width: canvas.width, height: canvas.height, href: canvas.toDataURL("image/png"),
      })),
    ]);
    const across = Array.from({ length: heads }, (_, c) => text(48 + c * step + size / 2, 46, String(c), middle));
    const title = text(12, 22, `${name}: layers down, heads across`, { "font-size": 14, "font-weight": 600 });
    return sheet(Math.max(420, 56 + heads * step), 64 + rows.length * step, title, across, drawn);
  }

  return { draw };
})();
