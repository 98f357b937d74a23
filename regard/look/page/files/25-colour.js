/**
 * Colours. Weights go from the background colour to one end, vectors and differences from blue over the background to
 * orange: both are safe for colour-blind readers, and the lightness alone shows the size of a weight.
 */
Regard.colour = (() => {
  const WEIGHTS = {
    light: ["#f4f6f8", "#d3e3f1", "#93bfdf", "#4a8fc5", "#1c5c9e", "#08306b"],
    dark: ["#23272f", "#27466b", "#2f7391", "#4aa396", "#a3cf7b", "#fdf1a0"],
  };
  const SIGNED = {
    light: ["#084a8f", "#66a9d4", "#f4f4f2", "#f0a25c", "#9e3a03"],
    dark: ["#8fcbff", "#2f6ea6", "#24282f", "#a95c1c", "#ffb873"],
  };

  function dark() {
    const asked = Regard.state.now.theme;
    return asked ? asked === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const theme = () => (dark() ? "dark" : "light");
  const parsed = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

  /** [r, g, b] of a share from 0 to 1, on straight lines between the stops. */
  function between(stops, share) {
    const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    return stops[low].map((from, i) => Math.round(from + (at - low) * (stops[low + 1][i] - from)));
  }

  /** Return such a function with a table of 1024 colours, for pictures with many cells. */
  function ramp(stops) {
    const known = Array.from({ length: 1025 }, (_, i) => between(stops.map(parsed), i / 1024));
    return (share) => known[Math.round(1024 * Math.min(1, Math.max(0, share)))];
  }

  /**
   * Return a scale: `colour` of a value as [r, g, b]; `at`, the value at a share of the way from `from` to `to`; its
   * description (`scaleText`). `none` is the share of the only value if the scale is empty.
   */
  function linear(stops, from, to, scaleText, none = 0) {
    const colours = ramp(stops);
    const colour = (value) => colours(to > from ? (value - from) / (to - from) : none);
    return { from, to, colour, at: (share) => from + share * (to - from), scaleText };
  }

  /** Return the chosen scale of weights; `most` is its upper end, and `whose` says what that is the maximum of. */
  function weights(most, whose) {
    const stops = WEIGHTS[theme()];
    const asked = Regard.state.now.scale;
    if (asked === "one") return linear(stops, 0, 1, "weight, fixed from 0 to 1");
    if (asked === "max") return linear(stops, 0, most, `weight, from 0 to the maximum of ${whose}`);
    const colours = ramp(stops);
    return {
      from: 1e-4, to: 1, colour: (value) => colours(1 + Math.log10(value) / 4), at: (share) => 10 ** (4 * share - 4),
      scaleText: "weight, logarithmic from 0.0001 to 1",
    };
  }

  /** Return a scale from -most over 0 to most. */
  function signed(most, scaleText = "") {
    return linear(SIGNED[theme()], -most, most, scaleText, 0.5);
  }

  const css = (rgb) => `#${rgb.map((x) => x.toString(16).padStart(2, "0")).join("")}`;

  /** Return black or white, whichever is readable on this colour. */
  function over([r, g, b]) {
    return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#14161a" : "#ffffff";
  }

  /** Return the value of a colour of the style sheet, for exported pictures. */
  function ink(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  return { dark, theme, weights, signed, css, over, ink };
})();
