/** The Predictions tab: the most probable tokens at each place, and the labels of classifiers. */
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

  /** Return the predictions of tokens that the model chose: neither those of a prompt nor visible ones. */
  function own(view) {
    const wrote = ({ given }) => (view.kind === "filling" ? given === false : !given);
    return (view.predictions ?? []).filter((one) => one.chosen && wrote(one));
  }

  function explain(view) {
    const wrote = own(view);
    const total = wrote.reduce((sum, one) => sum + one.chosen.log_prob, 0);
    return ["The most probable tokens at each place; the one that was taken, or given, is marked.",
      wrote.length > 0 && ` Together the ${wrote.length} that were taken have a log-probability of ${fixed(total, 4)}.`];
  }

  function placesCard(view) {
    const places = view.predictions.map((one) => placeOf(view, one));
    return card("Predictions", faint(explain(view)), element("div", { class: "places" }, places),
      Regard.export.buttons("predictions", { csv: () => csv(view) }));
  }

  function placeOf(view, one) {
    const where = element("span", { class: "faint" }, ` place ${one.place}`);
    const reads = ["filling", "classification"].includes(view.kind);
    const title = element("h3", {}, reads ? "at " : "after ", token(view.strips[one.strip].pieces[one.place]), where);
    return element("div", { class: "place", "data-place": one.place }, title, candidates(one));
  }

  /** Bars of the most probable tokens; the chosen one is marked, and added if it is not among them. */
  function candidates({ top, chosen, given }) {
    const missing = chosen && !top.some(({ id }) => id === chosen.id);
    const logits = top.every(({ logit }) => typeof logit === "number");
    const all = missing ? [...top, { ...chosen, p: Math.exp(chosen.log_prob) }] : top;
    const how = given ? "given" : "taken";
    const line = ({ id, piece, p, logit }) => element("li", { class: id === chosen?.id && "chosen" },
      token(piece, { class: "bar-name", title: `id ${id}` }),
      bar(p, id === chosen?.id ? `${percent(p)} ${how}` : percent(p), { title: `p = ${p}` }),
      logits && element("span", { class: "logit" }, fixed(logit, 2)));
    const names = ["token", "probability", "logit"].map((name) => element("span", {}, name));
    return element("ol", { class: "candidates" }, logits && element("li", { class: "faint" }, names), all.map(line));
  }

  function csv(view) {
    const line = ({ strip, place, chosen, given }) => ({ id, piece, p, logit }, rank) =>
      [strip, place, rank, id, piece, p, logit ?? "", Number(id === chosen?.id), Number(Boolean(given))];
    const rows = view.predictions.flatMap((one) => one.top.map(line(one)));
    return Regard.export.csv([["strip", "place", "rank", "id", "piece", "p", "logit", "taken", "given"], ...rows]);
  }

  return { draw, candidates, own };
})();
