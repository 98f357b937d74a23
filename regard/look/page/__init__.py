"""One input as a model saw it, and the page that shows it."""
