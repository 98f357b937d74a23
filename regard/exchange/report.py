"""What happened to every tensor on the way in or out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from regard.exchange.rules import Rule


@dataclass(frozen=True)
class Mapped:
    theirs: tuple[str, ...]
    ours: str
    shape: tuple[int, ...]  # ours
    how: str


@dataclass
class Report:
    family: str
    kind: str  # their class
    mapped: list[Mapped] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)  # their tensor -> why
    fresh: list[str] = field(default_factory=list)  # ours that they do not have
    unread: list[str] = field(default_factory=list)  # settings of theirs that mean nothing here
    notes: list[str] = field(default_factory=list)

    def add(self, rule: Rule, shape: tuple[int, ...]) -> None:
        self.mapped.append(Mapped(rule.names, rule.ours, shape, rule.how))

    def summary(self) -> str:
        lines = [f"{self.family} ({self.kind}): {len(self.mapped)} tensors mapped, {len(self.ignored)} ignored"]
        if self.fresh:
            lines.append(f"fresh, because they have none: {', '.join(self.fresh)}")
        lines += self.notes
        if self.unread:
            lines.append(f"settings without a meaning here: {', '.join(self.unread)}")
        return "\n".join(lines)

    def table(self) -> str:
        lines = [f"{' + '.join(m.theirs)} -> {m.ours} {list(m.shape)}, {m.how}" for m in self.mapped]
        lines += [f"{name}: ignored, {why}" for name, why in self.ignored.items()]
        return "\n".join(lines + [f"{name}: fresh" for name in self.fresh])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
