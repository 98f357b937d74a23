/** Sets the chosen colours before the page is drawn for the first time; without a choice the system's are used. */
(() => {
  try {
    const chosen = localStorage.getItem("regard.theme");
    if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  } catch {
    // A browser that keeps nothing for this page: the colours of the system.
  }
})();
