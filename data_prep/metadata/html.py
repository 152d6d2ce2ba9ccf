"""Extract the text of an HTML page and its tags, by BigScience's rules (bsmetadata/preprocessing_tools/html_parser).

Only the body is read. Removal rules drop elements with their content, chains of nested `div` elements become one, and
the remaining tags become spans of the text. Time and memory are linear in the size of the page.
"""

import contextlib
import gc
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]  a compiled module
from pydantic import Field, model_validator

from src.errors import DataError
from src.experiments.config import Config, load
from src.files import ROOT, read_yaml

Row = dict[str, Any]
RULES_FILE = ROOT / "resources" / "html_removal.yaml"
"""The default removal rules."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


COLUMNS = ("text", "metadata_html", "html_head", "html_footer", "html_title")
LONGEST_PAGE = 50_000_000
"""Maximum characters of a page."""
PARSED_AT_ONCE = 1 << 16
"""Bytes per call of the parser: a time limit takes effect between two calls."""
MAX_ATTRIBUTES = 10_000
"""Maximum attributes of a tag. Parsing time is quadratic in them, and the parser cannot be interrupted in a tag."""
BLOCKS = _words(
    "address article aside blockquote body button canvas caption col colgroup dd div dl dt embed fieldset figcaption "
    "figure footer form h1 h2 h3 h4 h5 h6 header hgroup hr li map noscript object ol output p pre progress section "
    "table tbody textarea tfoot th thead tr ul video"
)
"""Elements on lines of their own."""
SPACED_TAGS = _words("cite details datalist iframe img input label legend optgroup q select summary td time")
"""Elements with a blank on each side."""
HIDDEN = ("script", "style")
_FOLDED_TAG = "folded-block"
_ATTRIBUTE = r"""[\s/]*+[^\s/>][^\s/>=]*+(?:\s*+=\s*+(?:"[^"]*+"|'[^']*+'|[^\s>"']++))?+"""
_TAG = re.compile(
    rf"(?is)<!--.*?(?:-->|\Z)|(?P<tag><(?=[a-z])(?:(?P<raw>script|style)(?=[\s/>]))?(?:{_ATTRIBUTE})*+)(?(raw).*?(?:</(?P=raw)|\Z))"
)
"""A comment or a tag. `script` and `style` include their content, which can look like tags."""
_END = r"</(?:body|html)(?=[\s/>])[^>]*+>?"
_FIRST_END = re.compile(rf"(?i){_END}")
_ONLY_ENDS = re.compile(rf"(?is)(?:\s|<!--.*?(?:-->|\Z)|{_END})*+")
_TAG_OR_END = re.compile(rf"{_TAG.pattern}|(?P<end>{_END})")
BLANK_PAGE = re.compile(r"(?is)(?:[\s\x00\ufeff]|<!--.*?(?:-->|\Z)|<!doctype[^>]*>|<\?[^>]*>)*+")
_ILLEGAL = re.compile(
    r"(?i)[\x00-\x08\x0b\x0e-\x1f\ufffe\uffff]|"
    r"&#(?:0*(?:[1-8]|11|1[4-9]|2\d|3[01]|6553[45])(?!\d)|x0*(?:[1-8bef]|1[\da-f]|fff[ef])(?![\da-f]));?"
)
"""Characters that browsers do not show and XML does not allow, also as references."""
_FORM_FEED = re.compile(r"(?i)\f|&#(?:0*12(?!\d)|x0*c(?![\da-f]));?")
"""Form feed. XML does not allow it either, but it is white space."""
_HTML_SPACES = re.compile("[ \t\n\f\r]+")
_SPACES = re.compile(r"\s+")


class RemovalRule(Config):
    """Removal of the elements of one tag, with their content."""

    tag: str = Field(min_length=1)
    min_chars: int = Field(default=0, ge=0)
    max_chars: int | None = Field(default=None, ge=0)
    """Both limits are inclusive and apply to the text in the element; None: no limit."""
    direction: Literal["top-down", "bottom-up"] = "top-down"
    """Whether the text is measured before or after removals inside the element."""

    @model_validator(mode="after")
    def _can_match(self) -> "RemovalRule":
        if not re.fullmatch(r"[^\sA-Z<>/]+", self.tag):
            raise ValueError(f"tag: expected the name of a tag in lower case without brackets, got {self.tag!r}.")
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars: expected at least min_chars {self.min_chars}, got {self.max_chars}.")
        return self


class _RemovalRules(Config):
    rules: list[RemovalRule]


class Page(NamedTuple):
    """The extracted parts of a page."""

    text: str
    tags: list[Row]
    """Local items of the key "html", ordered by the end of their span."""
    head: list[str]
    footer: list[str]
    title: list[str]
    """HTML of the elements with these names. A nested element is only part of the outer one."""

    def columns(self) -> Row:
        """Return the page as columns of a row."""
        return dict(zip(COLUMNS, self, strict=True))


@lru_cache(8)
def read_rules(path: Path = RULES_FILE) -> tuple[RemovalRule, ...]:
    """Read removal rules from a YAML file.

    Raises:
        ConfigError: one line per mistake, with the file and the dotted path.
    """
    return tuple(load(_RemovalRules, read_yaml(path, "a list of rules under the key `rules`"), str(path)).rules)


def extract(source: str, rules: Sequence[RemovalRule] | None = None) -> Page:
    """Extract the text and the tags of a page. rules: removals; default: those of `RULES_FILE`.

    Raises:
        DataError: the page is too long, or is not HTML.
    """
    if len(source) > LONGEST_PAGE:
        raise DataError(f"a page of {len(source)} characters; the limit is {LONGEST_PAGE}.")
    with _no_garbage_collection():
        return _extract(source, read_rules() if rules is None else rules)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which takes half of the time of a large page. Elements form no reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _extract(source: str, rules: Sequence[RemovalRule]) -> Page:
    root = _parse(source)
    head, footer, title = (
        [etree.tostring(element, encoding="unicode", with_tail=False) for element in _outermost(root, name)]
        for name in ("head", "footer", "title")
    )  # empty elements are written as <meta/>, like the reference
    body = next(root.iter("body"), None)
    if body is None:
        return Page("", [], head, footer, title)
    body.tail = None
    cleaner = _Cleaner(rules)
    text, tags = _text_and_tags(body, cleaner.attributes) if cleaner.clean(body) else ("", [])
    return Page(text, tags, head, footer, title)


def _without_ends(source: str) -> str:
    """The page without its `</body>` and `</html>`, if there is more after them: browsers show it, the parser drops it
    (https://html.spec.whatwg.org/multipage/parsing.html#parsing-main-afterbody)."""
    first = _FIRST_END.search(source)
    if first is None or _ONLY_ENDS.fullmatch(source, first.start()):
        return source
    return _TAG_OR_END.sub(lambda match: "" if match["end"] else match[0], source)


def _parse(source: str) -> Any:
    source = _without_ends(source)
    data = _FORM_FEED.sub(" ", _ILLEGAL.sub("", source)).encode("utf-8", "replace")
    _check_attributes(source)
    try:
        parser = etree.HTMLParser(remove_comments=True, remove_pis=True, huge_tree=True, encoding="utf-8")
        for begin in range(0, len(data), PARSED_AT_ONCE):
            parser.feed(data[begin : begin + PARSED_AT_ONCE])
        root = parser.close()
    except (etree.LxmlError, ValueError) as error:
        raise DataError(f"no HTML can be read ({error}).") from None
    if root is None:
        raise DataError("no HTML can be read (there is no element).")
    if any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.feed_error_log):
        raise DataError("tags are nested too deep for the parser (2,048 levels).")
    return root


def _check_attributes(source: str) -> None:
    if len(source) <= 2 * MAX_ATTRIBUTES:
        return
    for match in _TAG.finditer(source):
        tag = match["tag"] or ""
        if len(tag) > 2 * MAX_ATTRIBUTES and (count := len(re.findall(_ATTRIBUTE, tag)) - 1) > MAX_ATTRIBUTES:
            raise DataError(f"a tag with {count} attributes; the limit is {MAX_ATTRIBUTES}.")


def _attributes(element: Any) -> dict[str, list[str]]:
    if len(element.attrib) < 100:
        return {name: [value] for name, value in element.items()}
    return {value.attrname: [str(value)] for value in element.xpath("@*")}  # items() looks each value up in a list


def _outermost(root: Any, name: str) -> list[Any]:
    """Elements with this name that are not inside another one."""
    elements, depth = [], 0
    for event, element in etree.iterwalk(root, events=("start", "end"), tag=name):
        if event == "start" and not depth:
            elements.append(element)
        depth += 1 if event == "start" else -1
    return elements


class _Cleaner:
    """Removes elements by rules and folds nested divisions. Each text is joined once, for linear time."""

    def __init__(self, rules: Sequence[RemovalRule]) -> None:
        self._rules = {direction: defaultdict[str, list[RemovalRule]](list) for direction in ("top-down", "bottom-up")}
        for rule in rules:
            self._rules[rule.direction][rule.tag].append(rule)
        self._lengths: dict[Any, int] = {}
        """Text length of each element. The dict holds the elements, because lxml would make new objects for them."""
        self.attributes: dict[Any, dict[str, list[str]]] = {}
        """Attributes of the outer element of each folded chain, with one value per element that has it."""

    def clean(self, body: Any) -> bool:
        """Remove and fold elements below `body`, parents first. Returns False if the body itself is removed."""
        hidden = {element for name in HIDDEN for element in body.iter(name)}  # not part of the length of a block
        for parent in {element.getparent() for element in hidden}:
            _remove(parent, hidden)
        self._measure(body)
        removed = set[Any]()
        stack: list[tuple[Any, Any, bool]] = [(body, None, False)]
        while stack:
            element, outer, is_cleaned = stack.pop()
            # outer: the division that `element` was folded into
            tag = element.tag
            if is_cleaned:
                _remove(element, removed)
                if self._rules["bottom-up"]:
                    self._lengths[element] = len(element.text or "") + sum(
                        self._lengths[child] + len(child.tail or "") for child in element
                    )
                    if self._matches("bottom-up", element):
                        removed.add(element)
                continue
            head = outer if tag == _FOLDED_TAG else element
            if head.tag == "div" and len(element) == 1 and element[0].tag == "div":
                self._fold(head, element[0])
            if self._matches("top-down", element):
                removed.add(element)
                continue
            stack.append((element, outer, True))
            stack += [(child, head if child.tag == _FOLDED_TAG else None, False) for child in reversed(element)]
        return body not in removed

    def _fold(self, head: Any, child: Any) -> None:
        if head not in self.attributes:
            self.attributes[head] = _attributes(head)
        attributes = self.attributes[head]
        for name, values in _attributes(child).items():
            attributes.setdefault(name, []).extend(values)
        child.tag = _FOLDED_TAG

    def _matches(self, direction: Literal["top-down", "bottom-up"], element: Any) -> bool:
        length = self._lengths[element]
        rules = self._rules[direction].get(element.tag, ())
        return any(rule.min_chars <= length and (rule.max_chars is None or length <= rule.max_chars) for rule in rules)

    def _measure(self, body: Any) -> None:
        """Collapse white space outside preformatted text, as the reference's minifier does, and measure elements."""
        depth_of_pre, length = 0, 0
        begins = list[int]()
        for event, element in etree.iterwalk(body, events=("start", "end")):
            is_pre = element.tag in ("pre", "textarea")
            if event == "start":
                begins.append(length)
                depth_of_pre += is_pre
                text = element.text
                if text and not depth_of_pre and (collapsed_text := _HTML_SPACES.sub(" ", text)) != text:
                    element.text = text = collapsed_text
            else:
                self._lengths[element] = length - begins.pop()
                depth_of_pre -= is_pre
                text = element.tail
                if text and not depth_of_pre and (collapsed_text := _HTML_SPACES.sub(" ", text)) != text:
                    element.tail = text = collapsed_text
            length += len(text or "")


def _remove(parent: Any, removed: Collection[Any]) -> None:
    """Remove children. The text after each child is joined to the text before it with one blank."""
    children = [child for child in parent if child in removed]
    if not children:
        return
    before, pieces = None, [parent.text or ""]
    last = pieces[0][-1:]
    for child in list(parent):
        tail = child.tail or ""
        if child not in removed:
            _set_text(parent, before, pieces)
            before, pieces, last = child, [tail], tail[-1:]
            continue
        if tail:
            if last and last != " " and tail[0] != " ":
                pieces.append(" ")
            pieces.append(tail[1:] if tail[0] == " " == last else tail)
            last = tail[-1]
        child.tail = None
        parent.remove(child)
    _set_text(parent, before, pieces)


def _set_text(parent: Any, before: Any, pieces: Sequence[str]) -> None:
    if len(pieces) == 1:
        return
    if before is None:
        parent.text = "".join(pieces)
    else:
        before.tail = "".join(pieces)


class _Text:
    """Extracted text, collected in pieces."""

    def __init__(self) -> None:
        self.pieces, self.length, self.last = list[str](), 0, ""

    def add(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.length, self.last = self.length + len(text), text[-1]

    def part(self, tag: str) -> None:
        """Start a new line or add a blank before or after the content of a tag."""
        if tag in BLOCKS or tag == _FOLDED_TAG:
            if self.last == " ":
                self.pieces[-1] = self.pieces[-1][:-1] + "\n"
                self.last = "\n"
            elif self.length and self.last != "\n":
                self.add("\n")
        elif tag in SPACED_TAGS and self.length and self.last not in " \n":
            self.add(" ")

    def add_collapsed(self, text: str) -> None:
        """Append text with each run of white space as one blank, and no blank after white space."""
        text = _SPACES.sub(" ", text)  # no-break spaces, too
        self.add(text[1:] if text[:1] == " " and (not self.length or self.last.isspace()) else text)


def _text_and_tags(body: Any, folded_blocks: Mapping[Any, Mapping[str, Sequence[str]]]) -> tuple[str, list[Row]]:
    text, depth_of_pre = _Text(), 0
    counts = defaultdict[int, int](int)
    open_tags, tags = list[tuple[int, int]](), list[Row]()
    for event, element in etree.iterwalk(body, events=("start", "end")):
        name, at = element.tag, text.length
        place = counts[at]
        counts[at] = place + 1
        if event == "start":
            open_tags.append((at, place))
            depth_of_pre += name == "pre"
            if name == "br":
                text.add("\n")
            content = element.text
        else:
            start, start_place = open_tags.pop()
            depth_of_pre -= name == "pre"
            if name not in ("br", _FOLDED_TAG):
                attributes = folded_blocks.get(element) or _attributes(element)
                tags.append(
                    {
                        "key": "html",
                        "type": "local",
                        "char_start_idx": start,
                        "relative_start_pos": start_place,
                        "char_end_idx": at,
                        "relative_end_pos": place,
                        "value": name,
                        "html_attrs": {
                            "attrs": list(attributes),
                            "values": [" ".join(values) for values in attributes.values()],
                        },
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
    """Number the markers at each character from 0, after some were dropped."""
    at = defaultdict[int, list[tuple[int, Row, str]]](list)
    for tag in tags:
        for side in ("start", "end"):
            at[tag[f"char_{side}_idx"]].append((tag[f"relative_{side}_pos"], tag, f"relative_{side}_pos"))
    for sides in at.values():
        for place, (_, tag, name) in enumerate(sorted(sides, key=lambda side: side[0])):
            tag[name] = place
