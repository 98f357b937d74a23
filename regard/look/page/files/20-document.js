/**
 * The document: one JSON object, and arrays that are inflated when they are first shown.
 *
 * An array is base64 of deflated little-endian numbers. A file has them in <script type="text/plain" id="blob-N">; a page
 * of `regard serve` gets document and arrays from the server.
 */
Regard.document = (() => {
  const MASKED = -1e29; // lower scores are masked: -inf is stored as -1e30

  let read = null;
  let blobs = null; // the arrays that were given with the document
  const unpacked = new Map(); // id of an array -> promise of its bytes
  const predicted = new Map(); // view -> its predictions by token sequence and place

  /** Read the document of this file, or a given one: {document, blobs}. */
  function load(given = null) {
    read = given?.document ?? JSON.parse(document.getElementById("document").textContent);
    blobs = given?.blobs ?? null;
    unpacked.clear();
    predicted.clear();
    if (read.version !== 1) throw new Error(`this page reads documents of version 1, not ${read.version}`);
    return read;
  }

  // ---- arrays --------------------------------------------------------------------------------------------------------

  /** An array as it is stored: `first` slices of `size` numbers. */
  async function array(blob) {
    const [bytes, scale] = await Promise.all([bytesOf(blob.id), blob.scale && array(blob.scale)]);
    const [first, ...rest] = blob.shape;
    const size = rest.reduce((a, b) => a * b, 1);
    return { ...blob, first, size, numbers: numbers(bytes, blob.type), scale: scale?.numbers };
  }

  function bytesOf(id) {
    const stored = () => (blobs ? blobs[id] : document.getElementById(`blob-${id}`).textContent);
    if (!unpacked.has(id)) unpacked.set(id, inflate(stored()));
    return unpacked.get(id);
  }

  async function inflate(base64) {
    const stream = new Response(fromBase64(base64)).body.pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  function fromBase64(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
    return bytes;
  }

  function numbers(buffer, type) {
    if (type === "f32") return new Float32Array(buffer);
    if (type === "u8") return new Uint8Array(buffer);
    return Float32Array.from(new Uint16Array(buffer), half);
  }

  /** Convert the 16 bits of an fp16 number: sign, five bits of exponent, ten of fraction. */
  function half(bits) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1024 + fraction) * 2 ** (exponent - 25);
  }

  /** Return slice i along the first axis as fp32: the weights of a head, or the vector of a token. */
  function slice(given, i) {
    const part = given.numbers.subarray(i * given.size, (i + 1) * given.size);
    if (given.type !== "u8") return part;
    const [values, [, rows, width]] = [new Float32Array(part), given.shape];
    for (let j = 0; j < values.length; j++) {
      values[j] = given.scale[i * rows + Math.floor(j / width)] * (values[j] / given.levels) ** 2;
    }
    return values;
  }

  /**
   * Return the largest error of a weight in row r of slice i (i < 0: of the mean of all slices), half the distance to the
   * next level; for `together` weights with this sum, that of the sum.
   */
  function errorOf(given, i, r, value, together) {
    if (given.type !== "u8") return given.type === "f16" ? value * 2 ** -11 + together * 2 ** -25 : 0;
    const scale = scaleOf(given, i, r);
    return Math.sqrt(Math.max(value, 0) * together * scale) / given.levels + (together * scale) / (4 * given.levels ** 2);
  }

  function scaleOf({ scale, shape: [heads, rows] }, i, r) {
    if (i >= 0) return scale[i * rows + r];
    let total = 0;
    for (let head = 0; head < heads; head++) total += scale[head * rows + r];
    return total / heads;
  }

  // ---- what is in a view ---------------------------------------------------------------------------------------------

  const KINDS = {
    encoder: "encoder self-attention",
    decoder: "decoder self-attention",
    cross: "cross-attention",
    alignment: "alignment",
  };

  function kindsOf(view) {
    return Object.keys(KINDS).filter((kind) => view.attention.some((one) => one.kind === kind));
  }

  /** Return the layers of a kind, lowest first. */
  function layersOf(view, kind) {
    return view.attention.filter((one) => one.kind === kind).sort((a, b) => a.layer - b.layer);
  }

  function layerOf(view, kind, layer) {
    return view.attention.find((one) => one.kind === kind && one.layer === layer);
  }

  /** Return a short name of one of the views. */
  function nameOf(view) {
    const name = view.model?.name || view.model?.architecture || view.title;
    const letter = read.views.length > 1 ? `${"AB"[read.views.indexOf(view)]}: ` : "";
    return `${letter}${name}${view.changes?.length ? `, ${view.changes.join(", ")}` : ""}`;
  }

  /** Return the prediction of row `place` of a token sequence, if there is one. */
  function predictionOf(view, strip, place) {
    const name = (one) => `${one.strip} ${one.place}`;
    if (!predicted.has(view)) predicted.set(view, new Map((view.predictions ?? []).map((one) => [name(one), one])));
    return predicted.get(view).get(name({ strip, place }));
  }

  return {
    load, array, slice, errorOf, kindsOf, layersOf, layerOf, nameOf, predictionOf, KINDS, MASKED,
    get views() { return read.views; },
  };
})();
