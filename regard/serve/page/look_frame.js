/**
 * The look page inside the Look tab. It gets documents from the page around it and reports its height, the head that it
 * shows and the cell that was chosen. Both are from one server; messages of others are ignored.
 */
(() => {
  const tell = (message) => parent.postMessage(message, location.origin);

  addEventListener("message", ({ data, origin, source }) => {
    if (origin !== location.origin || source !== parent) return;
    if (data.type === "open") open(data);
    if (data.type === "theme") setTheme(data.theme);
  });

  let opened = false;
  let theme = "";

  /** Draw a document; tokens that were pinned in another text are forgotten. */
  function open({ document: tree, blobs, isNew, tab }) {
    const state = new URLSearchParams(location.hash.slice(1));
    if (isNew) for (const key of ["queries", "keys", "view"]) state.delete(key);
    if (tab) state.set("tab", tab);
    state.set("theme", theme);
    history.replaceState(null, "", `#${state}`);
    opened = true;
    Regard.main.open({ document: tree, blobs });
  }

  function setTheme(chosen) {
    theme = chosen;
    document.documentElement.dataset.theme = chosen;
    if (opened) Regard.state.change({ theme });
  }

  addEventListener("regard-drawn", ({ detail }) => tell({ type: "drawn", layer: detail.layer, head: detail.head }));
  addEventListener("regard-picked", ({ detail }) => tell({ type: "picked", ...detail }));
  new ResizeObserver(() => {
    tell({ type: "height", height: Math.ceil(document.body.getBoundingClientRect().height) });
  }).observe(document.body);
  tell({ type: "ready" });
})();
