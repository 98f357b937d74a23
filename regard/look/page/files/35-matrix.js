/**
 * Compute the matrix that is shown from stored weights: heads averaged, pieces merged into words, sinks hidden.
 *
 * A word of the keys gets the sum over its pieces, and a word of the queries the mean over its pieces, so that rows still
 * sum to 1. A side is one row or column: a token or a word, with the places of its pieces.
 */
Regard.matrix = (() => {
  const { array, slice, errorOf } = Regard.document;

  /**
   * @param options  words: true or false; sinks: "show", "hide" or "renormalize"
   * @returns values (rows x columns), its sides, notes on what was done, the largest error of a value in a row
   *   (error(r, value)), and whether values are rounded at all (rounded)
   */
  async function shown(view, attention, head, options) {
    const stored = await array(attention.weights);
    const plain = head < 0 ? meanOfHeads(stored) : slice(stored, head);
    const rows = sides(view.strips[attention.queries], options.words);
    if (!options.words) sayWritten(view, attention, rows);
    const every = sides(view.strips[attention.keys], options.words);
    const columns = options.sinks === "show" ? every : every.filter((side) => !side.special);
    const values = gathered(plain, view.strips[attention.keys].ids.length, rows, columns);
    const sums = options.sinks === "renormalize" ? renormalize(values, rows.length) : null;
    const notes = notesOf(attention, head, options, every.length - columns.length);
    const error = errors(stored, head, rows, columns, sums);
    return { values, rows, columns, attention, head, view, notes, error, rounded: stored.type !== "f32" };
  }

  /** Return the tokens of a sequence, or its words. */
  function sides(strip, words) {
    if (words) return strip.words.map(([word, places]) => side(strip, word, places));
    return strip.pieces.map((piece, place) => side(strip, piece, [place]));
  }

  function side(strip, label, places) {
    const special = places.every((place) => strip.special?.[place]); // a likely sink
    return { label, places, last: places.at(-1), special };
  }

  /** Add the token that a step of the decoder wrote to its row, which is labelled by the token that it read. */
  function sayWritten(view, { kind, queries }, rows) {
    if (!["cross", "alignment"].includes(kind)) return;
    for (const row of rows) row.wrote = Regard.document.predictionOf(view, queries, row.last)?.chosen?.piece;
  }

  function meanOfHeads(stored) {
    const total = new Float32Array(stored.size);
    for (let head = 0; head < stored.first; head++) {
      slice(stored, head).forEach((value, i) => { total[i] += value / stored.first; });
    }
    return total;
  }

  function gathered(plain, width, rows, columns) {
    if (rows.length * columns.length === plain.length) return plain.slice(); // neither words nor anything hidden
    const values = new Float32Array(rows.length * columns.length);
    let i = 0;
    for (const row of rows) {
      for (const column of columns) {
        let total = 0;
        for (const query of row.places) for (const key of column.places) total += plain[query * width + key];
        values[i++] = total / row.places.length;
      }
    }
    return values;
  }

  /** Divide rows by their sums, and return the sums; a row whose keys are all hidden stays zero. */
  function renormalize(values, rows) {
    const width = values.length / rows;
    const sums = [];
    for (let start = 0; start < values.length; start += width) {
      const row = values.subarray(start, start + width);
      const sum = row.reduce((a, b) => a + b, 0);
      if (sum > 0) row.forEach((value, i) => { row[i] = value / sum; });
      sums.push(sum);
    }
    return sums;
  }

  /** Return the largest error of a value in row r; renormalised values are divided by a sum that has an error too. */
  function errors(stored, head, rows, columns, sums) {
    const pieces = columns.map((side) => side.places.length); // their errors add up
    const [together, all] = [Math.max(1, ...pieces), pieces.reduce((a, b) => a + b, 0)];
    return (r, value) => {
      const off = (total, count) => Math.max(...rows[r].places.map((q) => errorOf(stored, head, q, total, count)));
      if (!sums) return off(value, together);
      const [sum, most] = [sums[r], off(sums[r], all)];
      if (most === 0) return 0;
      return sum > most ? Math.min(1, (off(value * sum, together) + value * most) / (sum - most)) : 1;
    };
  }

  function notesOf(attention, head, { words, sinks }, hidden) {
    const what = `${hidden} likely sinks among the keys (special tokens, punctuation) are hidden`;
    return [
      head < 0 && `Mean of ${attention.heads} heads.`,
      words && "Pieces are put together to words: summed over keys, averaged over queries.",
      sinks === "hide" && `${what} and nothing is renormalised: rows sum to less than 1.`,
      sinks === "renormalize" && `${what} and each row is renormalised: it sums to 1 over what is left.`,
    ].filter(Boolean);
  }

  // ---- values --------------------------------------------------------------------------------------------------------

  const most = (matrix) => matrix.values.reduce((a, b) => Math.max(a, b), 0);
  const at = (matrix, r, c) => matrix.values[r * matrix.columns.length + c];

  /** Format a value with all digits that are certain. */
  const exactAt = (matrix, r, c) => Regard.dom.exact(at(matrix, r, c), matrix.error(r, at(matrix, r, c)));

  function row(matrix, r) {
    const width = matrix.columns.length;
    return matrix.values.subarray(r * width, (r + 1) * width);
  }

  const sumOfRow = (matrix, r) => row(matrix, r).reduce((a, b) => a + b, 0);

  /** Return whether a key is masked; for words, whether all pairs of their pieces are. */
  function masked(matrix, r, c) {
    if (matrix.hidden) return matrix.hidden(r, c);
    const { attention, head, rows, columns } = matrix;
    return !rows[r].places.some((query) => columns[c].places.some((key) => maySee(attention, head, query, key)));
  }

  const anyMasked = (matrix) => matrix.rows.some((_, r) => matrix.columns.some((_, c) => masked(matrix, r, c)));

  /**
   * Return whether a key is visible. A layer, or each of its heads, has the first and last visible key of each query, and
   * the masked keys in between; without these the mask is causal. For the mean of heads, a key is visible if any head sees it.
   */
  function maySee({ seen: all, causal }, head, query, key) {
    if (!all) return !causal || key <= query;
    const seen = all.heads?.[head] ?? all;
    return key >= seen.first[query] && key <= seen.last[query] && !forbiddenOf(seen).get(query)?.has(key);
  }

  const forbidden = new WeakMap(); // mask of a layer -> query -> masked keys

  function forbiddenOf(seen) {
    if (!forbidden.has(seen)) {
      const keys = new Map();
      for (const [query, key] of seen.forbidden) keys.set(query, (keys.get(query) ?? new Set()).add(key));
      forbidden.set(seen, keys);
    }
    return forbidden.get(seen);
  }

  /** Return which of these sides contain a pinned token. */
  function pinned(some, places) {
    return some.flatMap((one, i) => (one.places.some((place) => places.includes(place)) ? [i] : []));
  }

  function pinsOf(matrix, { queries, keys }) {
    return { rows: pinned(matrix.rows, queries), columns: pinned(matrix.columns, keys) };
  }

  /** Return the mean weights of some queries, one number per column. */
  function meanRow(matrix, rows) {
    return Float32Array.from(matrix.columns, (_, c) => rows.reduce((sum, r) => sum + at(matrix, r, c), 0) / rows.length);
  }

  /** Return the summed weights on some keys, one number per row. */
  function sumColumn(matrix, columns) {
    return Float32Array.from(matrix.rows, (_, r) => columns.reduce((sum, c) => sum + at(matrix, r, c), 0));
  }

  return { shown, most, at, exactAt, row, sumOfRow, masked, anyMasked, pinsOf, meanRow, sumColumn };
})();
