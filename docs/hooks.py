"""Hooks of mkdocs: pages from files outside docs/, pages that the code generates, and links between them."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import reference  # noqa: E402  needs the path above

SYSTEMS = sorted(path.parent.name for path in ROOT.glob("src/systems/*/README.md"))
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "dev/contributing.md",
    "CHANGELOG.md": "changelog.md",
    **{f"src/systems/{name}/README.md": f"systems/{name}.md" for name in SYSTEMS},
    "resources/README.md": "resources/index.md",
    **{
        f"resources/job_configs/{path.name}": f"resources/{path.name}"
        for path in (ROOT / "resources/job_configs").glob("*.md")
    },
}
"""File of the repository -> page of the site."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    sys.path.insert(0, str(ROOT))  # mkdocs undoes such a change at the top of this file
    generated = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in PAGES.items()}
    boost = "---\nsearch:\n  boost: 2\n---\n\n"  # a search for a field or flag finds its description first
    generated |= {page: boost + text for page, text in reference.pages().items()}
    for page, text in generated.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files of the repository to their pages. A file without a page is named instead."""
    place = page.file.src_uri
    source = next((name for name, target in PAGES.items() if target == place), f"docs/{place}")

    def rewrite(match: re.Match[str]) -> str:
        image, text, link, anchor = match[1], match[2], match[3], match[4] or ""
        if not link or "://" in link or place.startswith("reference/"):
            return match[0]
        target = os.path.normpath(Path(source).parent / link)
        if target in PAGES or target.startswith("docs/"):
            link = os.path.relpath(PAGES.get(target, target.removeprefix("docs/")), Path(place).parent)
            return f"{image}[{text}]({link}{anchor})"
        return f"{text} (`{target}`)" if text != f"`{target}`" else text

    return "".join(
        part if part.startswith("```") else _LINK.sub(rewrite, part)
        for part in re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    )
