"""Move the sentences of changelog.d into CHANGELOG.md as the release that ``lowtide.__version__`` names."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

import lowtide

HERE = Path(__file__).parent
CHANGELOG = HERE.parent / "CHANGELOG.md"
TYPES = ("added", "changed", "fixed", "removed")


def main() -> str | None:
    fragments = sorted(p for p in HERE.glob("*.md") if p.name != "README.md")
    if wrong := [p.name for p in fragments if p.name.split(".")[1:] not in [[t, "md"] for t in TYPES]]:
        return f"{', '.join(wrong)}: name each file <name>.<type>.md, with one of the types {', '.join(TYPES)}."
    if not fragments:
        return "changelog.d holds no sentences: there is nothing to release."
    page = CHANGELOG.read_text()
    if f"\n## {lowtide.__version__} " in page:
        return f"CHANGELOG.md has a release {lowtide.__version__} already. Set __version__ in src/lowtide/__init__.py."

    release = f"## {lowtide.__version__} ({datetime.datetime.now(datetime.UTC).date()})\n\n"
    for kind in TYPES:
        sentences = [" ".join(p.read_text().split()) for p in fragments if p.name.endswith(f".{kind}.md")]
        if sentences:
            release += f"### {kind.capitalize()}\n\n" + "".join(f"- {sentence}\n" for sentence in sentences) + "\n"
    head, newest_first, older = re.match(r"(.*?)(^## |\Z)(.*)", page, re.DOTALL | re.MULTILINE).groups()
    CHANGELOG.write_text(f"{head.rstrip()}\n\n{release}{newest_first}{older}".rstrip() + "\n")
    for fragment in fragments:
        fragment.unlink()
    return None


if __name__ == "__main__":
    sys.exit(main())
