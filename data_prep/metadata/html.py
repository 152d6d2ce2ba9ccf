"""A page of HTML as text, with its tags as metadata: BigScience's rules (bsmetadata/preprocessing_tools/html_parser).

Of the page only the body is read. Scripts, headers, footers, forms and short blocks go with all that they hold; chains of nested divisions
become one; what is left of the tags is kept as spans of the text.
"""

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]  a compiled module

from src.errors import DataError

Row = dict[str, Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


COLUMNS = ("text", "metadata_html", "html_head", "html_footer", "html_title")
LONGEST_PAGE = 50_000_000
"""Characters."""
SHORT = 64
"""A block of at most so many characters is left out."""
BLOCKS = _words(
    "address article aside blockquote body button canvas caption col colgroup dd div dl dt embed fieldset figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 header hgroup hr li map noscript object ol output p pre progress section table tbody textarea tfoot th thead tr "
    "ul video"
)
"""Elements that stand on lines of their own."""
SPACED = _words("cite details datalist iframe img input label legend optgroup q select summary td time")
"""Elements that are parted by a blank."""
HIDDEN = ("script", "style")
LEFT_OUT = _words("script style header iframe footer form")
LEFT_OUT_IF_SHORT = _words("body div p section table ul ol dl")
_FOLDED = "folded-block"
_SPACES = re.compile(r"\s+")


class Page(NamedTuple):
    """What is kept of a page."""

    text: str
    tags: list[Row]
    """Local items of the key "html", by where they end."""
    head: list[str]
    footer: list[str]
    title: list[str]
    """HTML of all elements of these names."""

    def columns(self) -> Row:
        """The page as columns of a row."""
        return dict(zip(COLUMNS, self, strict=True))


def extract(source: str, shortest: int = SHORT, left_out: Collection[str] = LEFT_OUT) -> Page:
    """The text and tags of a page.

    shortest: blocks of at most so many characters are left out; -1: none are. left_out: tags that go with all that they hold.

    Raises:
        DataError: the page is too long, or no HTML.
    """
    if len(source) > LONGEST_PAGE:
        raise DataError(f"a page of {len(source)} characters; at most {LONGEST_PAGE} are read.")
    try:
        parser = etree.HTMLParser(remove_comments=True, remove_pis=True, huge_tree=True, encoding="utf-8")
        root = etree.fromstring(source.encode("utf-8", "replace"), parser)
    except (etree.ParserError, etree.XMLSyntaxError, ValueError) as error:
        raise DataError(f"no HTML can be read ({error}).") from None
    if root is None:
        raise DataError("no HTML can be read (there is no element).")
    if any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.error_log):
        raise DataError("tags are nested too deep for the parser (2,048 levels).")
    head, footer, title = ([_markup(element) for element in root.iter(name)] for name in ("head", "footer", "title"))
    body = next(root.iter("body"), None)
    if body is None:
        return Page("", [], head, footer, title)
    body.tail = None
    text, tags = _text_and_tags(body) if _clean(body, shortest, left_out) else ("", [])
    return Page(text, tags, head, footer, title)


def _markup(element: Any) -> str:
    return etree.tostring(element, encoding="unicode", with_tail=False)  # empty elements as <meta/>, as the original has them


def _clean(body: Any, shortest: int, left_out: Collection[str]) -> bool:
    """Remove what is left out and fold nested divisions; parents before what they hold. Whether the body itself stays."""
    for hidden in [element for name in HIDDEN for element in body.iter(name)]:
        _remove(hidden)  # their text must not make a block long
    waiting: list[tuple[Any, Any]] = [(body, None)]
    while waiting:
        element, outer = waiting.pop()
        # outer: the division that `element` was folded into
        tag = element.tag
        kept = outer if tag == _FOLDED else element
        if kept.tag == "div" and len(element) == 1 and element[0].tag == "div":
            child = element[0]
            for name, value in child.attrib.items():
                kept.set(name, f"{kept.get(name)} {value}" if name in kept.attrib else value)
            child.tag = _FOLDED
        if tag in left_out or (tag in LEFT_OUT_IF_SHORT and _length(element) <= shortest):
            if element is body:
                return False
            _remove(element)
            continue
        waiting += [(child, kept if child.tag == _FOLDED else None) for child in reversed(element)]
    return True


_length = etree.XPath("string-length()")
"""Characters of all the text in an element."""


def _remove(element: Any) -> None:
    """Take an element out; what stands behind it stays, parted from what stands before by one blank."""
    parent, before, tail = element.getparent(), element.getprevious(), element.tail
    parent.remove(element)
    if not tail:
        return
    old = (parent.text if before is None else before.tail) or ""
    if old and old[-1:] != " " and tail[:1] != " ":
        tail = f" {tail}"
    elif old[-1:] == " " == tail[:1]:
        tail = tail[1:]
    if before is None:
        parent.text = old + tail
    else:
        before.tail = old + tail


class _Text:
    """Text as it grows."""

    def __init__(self) -> None:
        self.pieces, self.length, self.last = list[str](), 0, ""

    def add(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.length, self.last = self.length + len(text), text[-1]

    def part(self, tag: str) -> None:
        """Begin a new line, or leave a blank, where a tag asks for it."""
        if tag in BLOCKS or tag == _FOLDED:
            if self.last == " ":
                self.pieces[-1] = self.pieces[-1][:-1] + "\n"
                self.last = "\n"
            elif self.length and self.last != "\n":
                self.add("\n")
        elif tag in SPACED and self.length and self.last not in " \n":
            self.add(" ")

    def add_collapsed(self, text: str) -> None:
        """With runs of whitespace as one blank, and none after whitespace."""
        text = _SPACES.sub(" ", text)  # no-break spaces, too
        self.add(text[1:] if text[:1] == " " and (not self.length or self.last.isspace()) else text)


def _text_and_tags(body: Any) -> tuple[str, list[Row]]:
    text, depth_of_pre = _Text(), 0
    counts = defaultdict[int, int](int)
    opened, tags = list[tuple[int, int]](), list[Row]()
    for event, element in etree.iterwalk(body, events=("start", "end")):
        name, at = element.tag, text.length
        place = counts[at]
        counts[at] = place + 1
        if event == "start":
            opened.append((at, place))
            depth_of_pre += name == "pre"
            if name == "br":
                text.add("\n")
            content = element.text
        else:
            start, start_place = opened.pop()
            depth_of_pre -= name == "pre"
            if name not in ("br", _FOLDED):
                attributes = element.items()
                tags.append(
                    {
                        "key": "html",
                        "type": "local",
                        "char_start_idx": start,
                        "relative_start_pos": start_place,
                        "char_end_idx": at,
                        "relative_end_pos": place,
                        "value": name,
                        "html_attrs": {"attrs": [key for key, _ in attributes], "values": [value for _, value in attributes]},
                    }
                )
            content = element.tail
        if name != "br":
            text.part(name)
        if content:
            (text.add if depth_of_pre else text.add_collapsed)(content)
    _renumber(tags)
    return "".join(text.pieces), tags


def _renumber(tags: list[Row]) -> None:
    """Count the markers at each character from 0 again, after some were left out."""
    at = defaultdict[int, list[tuple[int, Row, str]]](list)
    for tag in tags:
        for side in ("start", "end"):
            at[tag[f"char_{side}_idx"]].append((tag[f"relative_{side}_pos"], tag, f"relative_{side}_pos"))
    for sides in at.values():
        for place, (_, tag, name) in enumerate(sorted(sides, key=lambda side: side[0])):
            tag[name] = place
