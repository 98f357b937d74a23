/** Export to files: numbers as CSV, pictures as SVG and PNG. Nothing is sent anywhere. */
Regard.export = (() => {
  const { element, visible } = Regard.dom;

  /** csv() -> text, picture() -> an <svg> that needs no style sheet; both may return promises. */
  function buttons(name, { csv = null, picture = null }) {
    const file = name.toLowerCase().replace(/[^\p{L}\p{N}.]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 80);
    const button = (kind, make) => {
      const onclick = async () => save(`${file}.${kind}`, await make());
      return Regard.dom.button(kind.toUpperCase(), onclick, { "data-export": kind, "data-key": `export ${kind} ${file}` });
    };
    return element("p", { class: "export" }, element("span", { class: "label" }, "Save as"),
      csv && button("csv", async () => new Blob([await csv()], { type: "text/csv;charset=utf-8" })),
      picture && button("svg", async () => svgBlob(await picture())),
      picture && button("png", async () => pngBlob(await picture())));
  }

  function save(name, blob) {
    const url = URL.createObjectURL(blob);
    element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  function svgBlob(picture) {
    return new Blob([new XMLSerializer().serializeToString(picture)], { type: "image/svg+xml;charset=utf-8" });
  }

  /** Draw the SVG to a PNG of twice the size, so that it is sharp. */
  async function pngBlob(picture) {
    const [width, height] = ["width", "height"].map((side) => Number(picture.getAttribute(side)));
    const times = Math.max(1, Math.min(2, 8000 / Math.max(width, height)));
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(picture))}`;
    await image.decode();
    const canvas = element("canvas", { width: Math.round(width * times), height: Math.round(height * times) });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  function csv(rows) {
    return rows.map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
  }

  function field(value) {
    const text = typeof value === "number" ? number(value) : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  /** Format a number with the fewest digits that identify it in fp32. */
  const number = (value) => (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(8))));

  /** Return a matrix as CSV, with keys in the first line and a query before each row. */
  function matrixCsv(matrix) {
    const width = matrix.columns.length;
    const rows = matrix.rows.map((side, r) => [visible(side.label), ...matrix.values.subarray(r * width, (r + 1) * width)]);
    return csv([["query \\ key", ...matrix.columns.map((side) => visible(side.label))], ...rows]);
  }

  return { buttons, csv, matrixCsv };
})();
