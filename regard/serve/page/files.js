/** Files that are translated as a whole: chosen or dropped, sent to the server, and offered for download. */

import { announce, button, element, icon, iconButton } from "./dom.js";
import { download, postForm } from "./service.js";

export class Files {
  /** `direction()` returns {source, target} as the page has them now; `formats` are endings such as ".txt". */
  constructor(direction, formats) {
    this.direction = direction;
    this.formats = formats;
    this.input = element("input", {
      type: "file", multiple: true, class: "unseen", id: "files", accept: formats.join(",") || null,
      onchange: () => { this.add(this.input.files); this.input.value = ""; },
    });
    this.choose = element("label", { class: "button", for: "files" }, icon("file"), "Translate files");
    this.list = element("ul", { class: "files", "aria-label": "Files" });
    const kinds = formats.length ? `: ${formats.join(" ")}` : "";
    this.node = element("div", { class: "file-area" }, this.input, this.choose,
      element("span", { class: "faint" }, `or drop them anywhere here${kinds}`), this.list);
  }

  /** Take files that are dropped on an element. */
  acceptDrops(target) {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    let inside = 0;
    target.addEventListener("dragenter", (event) => {
      if (hasFiles(event)) target.classList.toggle("dropping", ++inside > 0);
    });
    target.addEventListener("dragleave", (event) => {
      if (hasFiles(event)) target.classList.toggle("dropping", --inside > 0);
    });
    target.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    target.addEventListener("drop", (event) => {
      inside = 0;
      target.classList.remove("dropping");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  add(files) {
    for (const file of files) this.translate(file);
  }

  async translate(file) {
    const running = new AbortController();
    const said = element("span", { class: "faint" }, "translating …");
    const end = element("span", { class: "file-end" }, iconButton("stop", "Stop", () => running.abort()));
    const name = element("bdi", { dir: "auto" }, file.name);
    const row = element("li", { "data-state": "running" }, icon("file"), name, said, end);
    this.list.append(row);
    const settle = (state, text, ...more) => {
      row.dataset.state = state;
      said.textContent = text;
      end.replaceChildren(...more, iconButton("close", `Remove ${file.name} from the list`, () => row.remove()));
      announce(`${file.name}: ${text || "translated"}`);
    };
    const again = () => button("Try again", () => { row.remove(); this.translate(file); }, { class: "small" });
    try {
      const { source, target } = this.direction();
      const fields = { file, source: source || "auto", target };
      const { translatedFileUrl: url } = await postForm("/translate_file", fields, running.signal);
      const save = button("Download", () => this.save(url, file.name, target, said), { class: "strong small" });
      settle("done", "", save);
    } catch (error) {
      if (error.name === "AbortError") settle("stopped", "stopped", again());
      else settle("failed", error.message, again());
    }
  }

  /** Fetch the translated file with the key of this page, and save it. */
  async save(url, name, target, said) {
    try {
      const href = URL.createObjectURL(await download(url));
      element("a", { href, download: translatedName(name, target) }).click();
      setTimeout(() => URL.revokeObjectURL(href), 10_000);
    } catch (error) {
      said.textContent = error.message;
    }
  }
}

function translatedName(name, target) {
  const dot = name.lastIndexOf(".");
  return dot > 0 ? `${name.slice(0, dot)}.${target}${name.slice(dot)}` : `${name}.${target}`;
}
