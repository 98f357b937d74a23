/**
 * The document: one JSON object, and arrays that are unpacked when they are first shown.
 *
 * An array stands in a <script type="text/plain" id="blob-N"> as base64 of deflated little-endian numbers.
 */
Regard.document = (() => {
  const MASKED = -1e29; // scores below were masked: -inf is stored as -1e30

  let read = null;
  const unpacked = new Map(); // id of an array -> promise of its bytes
  const predicted = new Map(); // view -> its predictions by strip and place

  function load() {
    read = JSON.parse(document.getElementById("document").textContent);
    if (read.version !== 1) throw new Error(`this page reads documents of version 1, not ${read.version}`);
    return read;
  }

  // ---- arrays -------------------------------------------------------------------------------------------------------

  /** An array as it is stored: `first` slices of `size` numbers. */
  async function array(blob) {
    const bytes = await bytesOf(blob.id);
    const [first, ...rest] = blob.shape;
    return { ...blob, first, size: rest.reduce((a, b) => a * b, 1), numbers: numbers(bytes, blob.type) };
  }

  function bytesOf(id) {
    if (!unpacked.has(id)) unpacked.set(id, inflate(document.getElementById(`blob-${id}`).textContent));
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

  /** Sixteen bits as a number: sign, five bits of exponent, ten of fraction. */
  function half(bits) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1024 + fraction) * 2 ** (exponent - 25);
  }

  /** Slice i along the first axis, as fp32: a head of weights, a token of vectors. */
  function slice(given, i) {
    const part = given.numbers.subarray(i * given.size, (i + 1) * given.size);
    if (given.type !== "u8") return part;
    const [values, step] = [new Float32Array(part), stepOf(given, i)];
    for (let j = 0; j < values.length; j++) values[j] *= step;
    return values;
  }

  /** By how much a weight may be off: half of what lies between two neighbouring levels. */
  function errorOf(blob, i) {
    return blob.type === "u8" ? stepOf(blob, i) / 2 : blob.type === "f16" ? 2 ** -12 : 0;
  }

  function stepOf(blob, i) {
    return (blob.scale ? blob.scale[i] ?? blob.scale[0] : 1) / (blob.levels ?? 255);
  }

  // ---- what is in a view --------------------------------------------------------------------------------------------

  const KINDS = {
    encoder: "encoder self-attention",
    decoder: "decoder self-attention",
    cross: "cross-attention",
    alignment: "alignment",
  };

  function kindsOf(view) {
    return Object.keys(KINDS).filter((kind) => view.attention.some((one) => one.kind === kind));
  }

  /** The layers of a kind, lowest first. */
  function layersOf(view, kind) {
    return view.attention.filter((one) => one.kind === kind).sort((a, b) => (a.layer ?? 0) - (b.layer ?? 0));
  }

  function layerOf(view, kind, layer) {
    return view.attention.find((one) => one.kind === kind && (one.layer ?? 0) === layer);
  }

  /** In one or two words which of the views this is. */
  function nameOf(view) {
    const name = view.model?.name || view.model?.architecture || view.title;
    const letter = read.views.length > 1 ? `${"AB"[read.views.indexOf(view)]}: ` : "";
    return `${letter}${name}${view.changes?.length ? `, ${view.changes.join(", ")}` : ""}`;
  }

  /** What row `place` of a strip wrote, if it wrote anything. */
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
