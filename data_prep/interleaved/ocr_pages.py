"""Pages with the lines of their texts, in the layout `ocr` of vision/m4 (pixparse's pdfa and idl):
KEY.json with KEY.png or KEY.pdf.

The JSON has "pages", each with its lines in "text" or in "lines": {"text"}. Every page becomes a separate
document with its image and its lines. pypdfium2 (requirements/pdf.txt) renders PDF pages in grey with 150 dots per
inch, as m4 does.
"""

import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from data_prep.interleaved.rows import INCOMPLETE, ReaderOptions, Row, text_part
from data_prep.interleaved.write import Part
from src.data import jsonl
from src.errors import ConfigError, DataError
from src.systems.interleaved.streaming import tar_index
from src.systems.interleaved.streaming.tars.members import scan, split_names

_READ = ("json", "png", "jpeg", "jpg", "pdf")
DOTS_PER_INCH, _POINTS_PER_INCH = 150, 72
BROKEN_PDF, OTHER_PAGES = "its PDF cannot be read", "it has other pages than texts of pages"


def read_pages(path: Path, options: ReaderOptions) -> Iterator[Row]:
    """Yield a row for each page of each document of a tar.

    Raises:
        DataError: the tar is truncated, or the JSON of a document has another layout.
        ConfigError: there is a PDF, but pypdfium2 is not installed.
    """
    with tar_index.open_tar(path) as tar:
        members = scan(tar)
        if members.cut:
            raise DataError(f"{path}: {members.cut.reason}. {members.cut.advice}")
        names = split_names(members.names)
        image_members = [
            (*name, members.data[i], members.sizes[i]) for i, name in enumerate(names) if not members.reasons[i]
        ]
        for number, (name, group) in enumerate(groupby(image_members, key=lambda member: member[0])):
            contents = dict[str, bytes]()
            for _, ending, begin, size in group:
                suffix = ending.rpartition(".")[2].lower()
                if suffix not in _READ or suffix in contents:
                    options.passed_over[
                        f"no known suffix: .{ending}" if suffix not in _READ else f"a second file: .{suffix}"
                    ] += 1
                else:
                    contents[suffix] = bytes(tar[begin : begin + size])
            yield from _pages(f"{number:08}", contents, f"{path}: document {name}")


def _pages(key: str, contents: dict[str, bytes], where: str) -> Iterator[Row]:
    """Yield the pages of a document. contents: {suffix: content of the file}."""
    image = next((contents[ending] for ending in ("png", "jpeg", "jpg") if ending in contents), None)
    if "json" not in contents or (image is None and "pdf" not in contents):
        yield Row(key, [], INCOMPLETE)
        return
    texts = _texts(contents["json"], where)
    if image is not None:
        images: Sequence[bytes] | None = [image]
        texts = ["\n".join(text for text in texts if text)]
    else:
        images = _draw(contents["pdf"])
    if images is None or len(images) != len(texts):
        yield Row(key, [], BROKEN_PDF if images is None else OTHER_PAGES)
        return
    for number, (page_image, text) in enumerate(zip(images, texts, strict=True)):
        yield Row(f"{key}-{number:04}", [Part("image", page_image), text_part(text)])


def _texts(content: bytes, where: str) -> list[str]:
    pages: Any = jsonl.parse(content, where).get("pages")
    jsonl.check_type(pages, list[dict], f"{where}: pages")
    texts = list[str]()
    for number, page in enumerate(pages):
        lines: Any = page.get("text", page.get("lines"))
        if isinstance(lines, dict):
            lines = lines.get("text")
        jsonl.check_type(lines, list[str], f"{where}: pages[{number}].text")
        texts.append("\n".join(lines))
    return texts


def _draw(content: bytes) -> list[bytes] | None:
    """Render the pages of a PDF as images; None if it is unreadable."""
    try:
        import pypdfium2
    except ModuleNotFoundError:
        raise ConfigError(
            "ocr: the package that renders PDFs is not installed: pip install -r requirements/pdf.txt"
        ) from None
    rendered_images = list[bytes]()
    try:
        document = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError:
        return None
    try:
        page: Any
        for page in document:
            out = io.BytesIO()
            page.render(scale=DOTS_PER_INCH / _POINTS_PER_INCH, grayscale=True).to_pil().save(out, "PNG")
            rendered_images.append(out.getvalue())
    except pypdfium2.PdfiumError:
        return None
    finally:
        document.close()
    return rendered_images
