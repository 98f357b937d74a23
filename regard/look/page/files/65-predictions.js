/** A tab: what the model thought of writing at each place, and the labels of those that classify. */
Regard.predictions = (() => {
  const { element, controls, card, faint, token, bar, percent, fixed } = Regard.dom;

  function draw(view) {
    return element("div", {}, controls(Regard.attention.viewChooser()),
      view.labels?.length && labelsCard(view), view.predictions?.length && placesCard(view));
  }

  function labelsCard(view) {
    const rows = [...view.labels].sort((a, b) => b.p - a.p);
    const lines = rows.map(({ label, p }, i) => element("li", { class: i === 0 && "chosen" },
      token(label, { class: "bar-name" }), bar(p, percent(p), { title: `p = ${p}` })));
    const csv = () => Regard.export.csv([["label", "p"], ...rows.map((row) => [row.label, row.p])]);
    return card("Labels", element("ol", { class: "candidates wide" }, lines), Regard.export.buttons("labels", { csv }));
  }

  function placesCard(view) {
    const total = view.predictions.reduce((sum, one) => sum + (one.chosen?.log_prob ?? 0), 0);
    const said = `The most probable tokens at each place; the one that was taken is marked. Together those that were taken
      have a log-probability of ${fixed(total, 4)}.`;
    const places = view.predictions.map((one) => placeOf(view, one));
    return card("Predictions", faint(said), element("div", { class: "places" }, places),
      Regard.export.buttons("predictions", { csv: () => csv(view) }));
  }

  function placeOf(view, one) {
    const where = element("span", { class: "faint" }, ` place ${one.place}`);
    const reads = ["filling", "classification"].includes(view.kind);
    const title = element("h3", {}, reads ? "at " : "after ", token(view.strips[one.strip].pieces[one.place]), where);
    return element("div", { class: "place", "data-place": one.place }, title, candidates(one));
  }

  /** Bars of the best, the chosen one marked, also where it is not among them. */
  function candidates({ top, chosen }) {
    const missing = chosen && !top.some(({ id }) => id === chosen.id);
    const all = missing ? [...top, { ...chosen, p: Math.exp(chosen.log_prob) }] : top;
    const line = ({ id, piece, p }) => element("li", { class: id === chosen?.id && "chosen" },
      token(piece, { class: "bar-name", title: `id ${id}` }),
      bar(p, id === chosen?.id ? `${percent(p)} taken` : percent(p), { title: `p = ${p}` }));
    return element("ol", { class: "candidates" }, all.map(line));
  }

  function csv(view) {
    const rows = view.predictions.flatMap(({ strip, place, top, chosen }) =>
      top.map(({ id, piece, p }, rank) => [strip, place, rank, id, piece, p, Number(id === chosen?.id)]));
    return Regard.export.csv([["strip", "place", "rank", "id", "piece", "p", "taken"], ...rows]);
  }

  return { draw, candidates };
})();
