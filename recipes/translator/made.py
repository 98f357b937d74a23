"""What stage 3 leaves of each job: a folder that is whole or not there, whenever the job is killed.

made-STEM-LANG/train.{xx}.xz    the real text on one side, the model's on the other
made-STEM-LANG/made.json        what it was made with, and how many lines were left out for what
made-STEM-LANG/manifest.json    checksums
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.files import MANIFEST, atomic_folder, find_damage, read_json, sha256
from regard.model_folder import find

Pair = tuple[str, str]
STEMS = {"en-de": "de", "en-fr": "fr", "en-zh": "zh", "en-zh-Hant": "zh-Hant"}
SPEECHES = "europarl"


@dataclass(frozen=True)
class Job:
    stem: str  # whose real text is translated
    real: str
    to: str

    @property
    def name(self) -> str:
        return f"made-{self.stem}-{self.to}"

    @property
    def returns(self) -> bool:
        """Whether what is made must lead back to the real text: the model has seen no speeches in these languages."""
        return self.stem == SPEECHES

    def source(self, work: Path) -> Path:
        return work / f"{self.stem}.train.{self.real}.xz"

    def written(self, work: Path) -> Path:
        """What someone wrote in the language that is translated to."""
        return work / f"en-{self.to}.train.{self.to}.xz"


def jobs() -> list[Job]:
    """Long ones first."""
    speeches = [Job(SPEECHES, "en", to) for to in ("fr", "zh", "zh-Hant")]
    everyday = [Job(stem, "en", to) for stem in STEMS for to in STEMS.values()]
    return speeches + everyday + [Job(stem, lang, "en") for stem, lang in STEMS.items()]


def origin(work: Path, job: Job, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """All that decides what a job makes."""
    files = [job.source(work), *([job.written(work)] if job.returns else [])]
    texts = {file.name: sha256(file) for file in files}
    return {"model": sha256(find(Path(model)) / MANIFEST), "texts": texts, "options": options}


def is_made(work: Path, job: Job, made_with: dict[str, Any]) -> bool:
    folder = work / job.name
    return find_damage(folder) is None and read_json(folder / "made.json")["made with"] == made_with


def save(work: Path, job: Job, pairs: list[Pair], made_with: dict[str, Any], counts: dict[str, int]) -> None:
    with atomic_folder(work / job.name) as draft:
        for i, side in enumerate((job.real, job.to)):
            with lzma.open(draft / f"train.{side}.xz", "wt", encoding="utf-8", preset=1) as file:
                file.writelines(pair[i] + "\n" for pair in pairs)
        said = {"made with": made_with, "counts": counts}
        (draft / "made.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
