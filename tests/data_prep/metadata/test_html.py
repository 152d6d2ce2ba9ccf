"""Text and tags of pages."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lxml.html
import pytest

from data_prep.metadata import html
from data_prep.metadata.html import RemovalRule, extract, read_rules
from src.errors import ConfigError, DataError
from src.systems.metadata.data.annotations import read_row
from src.systems.metadata.data.linearise import insert, markers
from src.systems.metadata.data.processors import HtmlFilter, local_markers

UNLIMITED_RULES = [rule for rule in read_rules() if rule.max_chars is None]
"""Without the rules for short blocks."""


def tags(source: str, rules: Sequence[RemovalRule] = UNLIMITED_RULES) -> tuple[str, dict[str, list[str]]]:
    """Return the text, and the texts in each tag."""
    page = extract(source, rules)
    by_tag: dict[str, list[str]] = {}
    for tag in page.tags:
        by_tag.setdefault(tag["value"], []).append(page.text[tag["char_start_idx"] : tag["char_end_idx"]])
    return page.text, by_tag


def test_a_title():
    text, by_tag = tags("<html>\n<head>\n</head>\n<body>\n<h1>This is a title</h1>\n</body>\n</html>")
    assert text == "This is a title\n"
    assert by_tag == {"h1": ["This is a title"], "body": ["This is a title\n"]}


@pytest.mark.parametrize(
    "source",
    [
        "<html><body><p>one</p></body><p>two</p></html>",
        "<html><body><p>one</p></BODY ></html>\n<p>two</p>",
        "<body><p>one</p></body><body class=a><p>two</p></body>",
        "<html><body><p>one</p></body></html><!doctype html><html><body><p>two</p></body></html>",
    ],
)
def test_content_after_an_end_tag_of_the_body_is_read(source: str):
    """As browsers show it (HTML standard, "after body")."""
    text, by_tag = tags(source)
    assert text == "one\ntwo\n"
    assert by_tag == {"p": ["one", "two"], "body": ["one\ntwo\n"]}


def test_end_tags_of_the_body_within_scripts_and_attributes_are_unchanged():
    script = '<script>a = "</body></html>"</script>'
    page = extract(f"<head>{script}</head><body><p id='</body>'>one</p></body><p>two</p>", UNLIMITED_RULES)
    assert page.head == ['<head><script>a = "&lt;/body&gt;&lt;/html&gt;"</script></head>']
    assert page.tags[0]["html_attrs"] == {"attrs": ["id"], "values": ["</body>"]}
    assert page.text == "one\ntwo\n"


def test_nested_divisions():
    source = "<body><h1>T</h1><div><p>x</p>This is a <div>first</div> sub-div in div</div></body>"
    text, by_tag = tags(source)
    assert text == "T\nx\nThis is a\nfirst\nsub-div in div\n"
    assert by_tag["div"] == ["first", "x\nThis is a\nfirst\nsub-div in div"]


def test_chain_of_divisions_becomes_one():
    text, by_tag = tags(
        '<body><h1>this is a title that we keep</h1><div class="div-level-1" id=1>blablabla<div class="div-level-2" '
        'href="http">tidi '
        "<div id=3>tidi2</div></div></div></body>"
    )
    assert text == "this is a title that we keep\nblablabla\ntidi\ntidi2\n"
    assert {name: len(each) for name, each in by_tag.items()} == {"h1": 1, "div": 1, "body": 1}
    page = extract(
        "<body>aaa <div class=a id=1>b<div class=c href=http>d <div id=3>e</div></div></div></body>", UNLIMITED_RULES
    )
    assert page.tags[0]["html_attrs"] == {"attrs": ["class", "id", "href"], "values": ["a c", "1 3", "http"]}


def test_short_blocks_are_removed_and_scripts_do_not_count():
    words = "tidi tadada " * 8
    source = f"<body><h1>This is a title</h1><p>short</p><p>{words}</p><div>a<script>{'x' * 99}</script></div></body>"
    assert tags(source, read_rules())[0] == f"This is a title\n{words.strip()}\n"
    assert extract("<body>short</body>").text == ""


def test_positions_of_tags():
    words = "with some additional text to reach 64 characters tidi tadada tidi tadada tidi tadada"
    page = extract(f"<html><head></head><body><h1>This is a title</h1><p>{words}</p></body></html>")
    assert page.text == f"This is a title\n{words}\n"
    by_name = {tag["value"]: tag for tag in page.tags}
    place = ("char_start_idx", "char_end_idx", "relative_start_pos", "relative_end_pos")
    assert [by_name["h1"][name] for name in place] == [0, 15, 1, 0]
    assert [by_name["body"][name] for name in place] == [0, 101, 0, 0]


def test_rules_remove_elements_with_their_content():
    """M30."""
    inside, outside = "<div><p>This is a paragraph in a div</p></div>", "<p>This is a paragraph not in div</p>"
    page = extract(f"<html><body><h1>This is a title</h1>{inside}{outside}</body></html>", [RemovalRule(tag="div")])
    assert page.text == "This is a title\nThis is a paragraph not in div\n"
    assert len(page.tags) == 3


def test_chain_of_divisions_around_the_text():
    """M40, page 4: the chain is one division with the attributes of both, inside the body, of the same 80
    characters."""
    words = "tidi tadada tidi tadada tidi tadada tidi tadada tidi tadada tidi tadada tidi ta"
    page = extract(f'<html><body><div class="div-level-1"><div class="div-level-2">{words}</div></div></body></html>')
    assert page.text == f"{words}\n"
    assert len(page.text) == 80
    by_tag = {tag["value"]: tag for tag in page.tags}
    place = ("char_start_idx", "char_end_idx", "relative_start_pos", "relative_end_pos")
    assert [by_tag["div"][name] for name in place] == [0, 80, 1, 0]
    assert [by_tag["body"][name] for name in place] == [0, 80, 0, 1]
    assert by_tag["div"]["html_attrs"] == {"attrs": ["class"], "values": ["div-level-1 div-level-2"]}
    assert len(page.tags) == 2


def test_footers_outside_the_body_are_stored():
    """M40: they are strings of their own, and no text."""
    page = extract(f"<html><body><p>{'words ' * 20}</p></body><footer>one</footer><footer>two</footer></html>")
    assert page.footer == ["<footer>one</footer>", "<footer>two</footer>"]
    assert "one" not in page.text


def test_whitespace_breaks_and_preformatted_text():
    source = "<body> a  b\n c<br>d<pre> e\n  f</pre><span>g\u00a0\u00a0h</span><td>i</td>j</body>"
    assert tags(source)[0] == "a b c\nd\n e\n  f\ng h i j\n"


def test_head_footer_and_title_are_stored():
    page = extract(
        '<html><head><meta charset="utf-8"><title>T</title></head><body><footer>one</footer>text</body></html>',
        UNLIMITED_RULES,
    )
    assert page.head == ['<head><meta charset="utf-8"/><title>T</title></head>'], "M40: serialised anew"
    assert page.title == ["<title>T</title>"]
    assert page.footer == ["<footer>one</footer>"]
    assert "<title>" in page.head[0]
    assert page.text == "text\n"


@pytest.mark.parametrize("source", ["", "  ", "<!-- nothing -->"])
def test_no_page(source: str):
    with pytest.raises(DataError, match="no HTML can be read"):
        extract(source)


def test_tags_nested_ten_thousand_deep():
    page = extract("<body>" + "<b>" * 1000 + "deep" + "</b>" * 1000 + "</body>", UNLIMITED_RULES)
    assert (page.text, len(page.tags)) == ("deep\n", 1001)
    with pytest.raises(DataError, match="nested too deep"):
        extract("<body>" + "<b>" * 10_000 + "deep" + "</b>" * 10_000 + "</body>", UNLIMITED_RULES)


def random_page(seed: int) -> str:
    draw = random.Random(seed)

    def element(depth: int) -> str:
        name = draw.choice(["p", "div", "b", "i", "td", "table", "pre", "br", "img", "ul", "li", "script", "a class=x"])
        inside = "".join(
            draw.choice([" word ", "<", "&lt;b&gt;", "\n", "é", "", "[[x]]"]) for _ in range(draw.randrange(3))
        )
        inner = "".join(element(depth + 1) for _ in range(draw.randrange(3) if depth < 4 else 0))
        end = "" if draw.random() < 0.1 else f"</{name.split()[0]}>"
        return f"<{name}>{inside}{inner}{end}{draw.choice(['', ' tail ', 'tail'])}"

    return f"<body>{''.join(element(0) for _ in range(4))}</body>"


def test_markers_of_any_page_can_be_removed():
    for seed in range(300):
        page = extract(random_page(seed), UNLIMITED_RULES)
        by_tag = read_row({"text": page.text, "metadata_html": page.tags}, "row")

        def process(item: Any) -> Any:
            return local_markers(item, HtmlFilter(), "end")

        both = [insert(by_tag.text, markers(by_tag, ["html"], process, {}, how)) for how in ("nested", "compatible")]
        for marked_text in both:
            assert "".join(c for c, m in zip(*marked_text, strict=True) if not m) == page.text
        assert both[0].text.replace("\\", "") == both[1].text.replace("\\", ""), "tags of a page nest"


def test_short_is_measured_after_white_space_is_collapsed():
    navigation = "<ul>" + "".join(f"<li>\n{' ' * 40}item {number}\n</li>" for number in range(3)) + "</ul>"
    words = "words of a paragraph " * 4
    assert tags(f"<body><p>{words}</p>{navigation}</body>", read_rules())[0] == f"{words.strip()}\n"
    verbatim = f"<div><pre>{' ' * 70}x</pre></div>"
    assert tags(f"<body><p>{words}</p>{verbatim}</body>", read_rules())[0] == f"{words.strip()}\n{' ' * 70}x\n"


def test_rules_have_limits_and_directions():
    source = (
        f"<body>{'<p>' + 'word ' * 30 + '</p>'}<div><p>short</p><form>{'a form ' * 10}</form>tail</div>"
        "<b>bold</b></body>"
    )
    rule = RemovalRule(tag="div", max_chars=10)
    form = RemovalRule(tag="form")
    assert "tail" in extract(source, [rule, form]).text, "top-down: measured with the form"
    assert "short" not in extract(source, [rule.model_copy(update={"direction": "bottom-up"}), form]).text
    assert "short" in extract(source, [RemovalRule(tag="div", max_chars=8, direction="bottom-up"), form]).text
    assert "bold" not in extract(source, [RemovalRule(tag="b", min_chars=4, max_chars=4)]).text
    assert "bold" in extract(source, [RemovalRule(tag="b", min_chars=5)]).text
    assert extract(source, [RemovalRule(tag="body", min_chars=1, direction="bottom-up")]).text == ""


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("rules: [{tag: p, max_chars: -1}]", "rules[0].max_chars"),
        ("rules: [{tag: p}, {tag: div, min_chars: 9, max_chars: 3}]", "rules[1]"),
        ("rules: [{tag: p, direction: sideways}]", "rules[0].direction"),
        ("rules: [{max: 3}]", "rules[0]"),
        ("rules: [{tag: DIV}]", "rules[0]"),
        ("rules: [{tag: <p>}]", "rules[0]"),
        ("tags: []", ""),
        ("rules: [", ""),
    ],
)
def test_malformed_rules_are_refused(text: str, path: str, tmp_path: Path):
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'rules.yaml'}")) as error:
        read_rules(tmp_path / "rules.yaml")
    assert path in str(error.value)


def test_text_after_removed_elements_is_joined():
    forms = "".join(f"<form>f</form>tail{number}" for number in range(5))
    assert (
        tags(f"<body><p>a</p>{forms}<b>b</b>c<form>f</form> d <form>f</form> e</body>")[0]
        == "a\ntail0 tail1 tail2 tail3 tail4bc d e\n"
    )


@pytest.mark.parametrize("attributes", [9_000, 11_000])
def test_tags_with_very_many_attributes(attributes: int):
    names = " ".join(f"a{number}=v" for number in range(attributes))
    hidden = f"<script>if (a<b) {{ {'x ' * 11_000} }}</script><!-- <p {'x ' * 11_000}> -->"
    source = f"<body>{hidden}<div {names}><div {names}>text</div></div></body>"
    if attributes > 10_000:
        with pytest.raises(DataError, match=str(attributes)):
            extract(source, UNLIMITED_RULES)
    else:
        (tag, _) = extract(source, UNLIMITED_RULES).tags
        assert len(tag["html_attrs"]["attrs"]) == attributes
        assert tag["html_attrs"]["values"][0] == "v v"


def test_nested_footers_are_stored_once():
    page = extract(f"<body>{'words ' * 20}<footer>a<footer>b</footer></footer><footer>c</footer></body>")
    assert page.footer == ["<footer>a<footer>b</footer></footer>", "<footer>c</footer>"]


def test_size_of_chunks_does_not_change_a_page(monkeypatch: pytest.MonkeyPatch):
    sources = [random_page(seed).replace("tail", "tail<!-- c > <b> -->é&amp;&eacute;") for seed in range(100)]
    pages = [extract(source, UNLIMITED_RULES) for source in sources]
    monkeypatch.setattr(html, "PARSED_AT_ONCE", 7)
    assert [extract(source, UNLIMITED_RULES) for source in sources] == pages


SHORT_TAGS = {"body", "div", "p", "section", "table", "ul", "ol", "dl"}


def reference_text(source: str) -> str:
    """Text of a page by the reference's steps: collapse white space, clean the tree from the top, add text by single
    characters."""
    body = lxml.html.fromstring(source).find("body")
    assert body is not None
    for element in body.iter():
        element.text = re.sub("[ \t\n\f\r]+", " ", element.text or "")
        element.tail = re.sub("[ \t\n\f\r]+", " ", element.tail or "")

    def drop(element: Any) -> None:
        before, tail = element.getprevious(), element.tail or ""
        old = (element.getparent().text if before is None else before.tail) or ""
        if old and tail and old[-1] != " " and tail[0] != " ":
            tail = f" {tail}"
        element.tail = tail.removeprefix(" ") if old.endswith(" ") else tail
        element.drop_tree()

    def clean(element: Any) -> None:
        if element.tag in ("div", "folded") and len(element) == 1 and element[0].tag == "div":
            element[0].tag = "folded"
        length = len("".join(element.itertext()))
        if element.tag in ("header", "footer", "form") or (element.tag in SHORT_TAGS and length <= 64):
            drop(element)
            return
        for child in list(element):
            clean(child)

    clean(body)
    text = ""

    def add(tag: str, new: str) -> None:
        nonlocal text
        if tag in (*html.BLOCKS, "folded") and text and text[-1] != "\n":
            text = text[:-1] + "\n" if text[-1] == " " else text + "\n"
        for character in new.replace("\u00a0", " "):
            if (text and not (text[-1].isspace() and character.isspace())) or (not text and not character.isspace()):
                text += character

    def visit(element: Any) -> None:
        add(element.tag, element.text or "")
        for child in element:
            visit(child)
        add(element.tag, element.tail or "")

    visit(body)
    return text


def test_random_pages_with_layout_white_space_equal_the_reference():
    for seed in range(200):
        draw = random.Random(seed)

        def element(depth: int, draw: random.Random = draw) -> str:
            name = draw.choice(["div", "div", "div", "b", "section", "span", "footer", "em"])
            pieces = draw.choices(
                [" word ", "\n      ", "&lt;b&gt;", "é", "a text of words ", "\t", "&nbsp; "], k=draw.randrange(4)
            )
            inner = "".join(element(depth + 1) for _ in range(draw.randrange(4) if depth < 5 else 0))
            return f"<{name}>{''.join(pieces)}{inner}</{name}>" + draw.choice(["", " tail ", "tail", "\n    "])

        content = "".join(element(0) for _ in range(6))
        source = f"<html><head></head><body>{'a sentence that makes the body long ' * 2}{content}</body></html>"
        assert extract(source).text == reference_text(source), source


@pytest.mark.parametrize("character", [*range(1, 9), 11, *range(14, 32), 0xFFFE, 0xFFFF])
@pytest.mark.parametrize("form", ["{}", "&#{:d};", "&#x{:X};", "&#0{:d}"])
def test_characters_that_are_not_in_xml_are_dropped(character: int, form: str):
    reference = form.format(chr(character) if form == "{}" else character)
    page = f"<body><p>{'word ' * 20}a{reference}b  c<script></script>d<pre>e{reference}f<footer></footer>g</pre>"
    assert html.extract(page).text.split("word ")[-1] == "ab c d\nef g\n"


@pytest.mark.parametrize("feed", ["\f", "&#12;", "&#xC;"])
def test_form_feeds_are_white_space(feed: str):
    page = f"<body><p>{'word ' * 20}a{feed}b<pre>c{feed}d<footer></footer>e</pre>"
    assert html.extract(page).text.split("word ")[-1] == "a b\nc d e\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<html><body><p>a</p></body><p>b</p>c</html>", "a\nb\nc\n"),
        ("<html><body><p>a</p></body></html><p>b</p>c", "a\nb\nc\n"),
        ("<html><body>a</body></html><!doctype html><html><body><p>b</p></body></html>", "a\nb\n"),
        ('<body>a<script>write("</body>")</script>b<a title="</body>">c</a></body \n>d', "a bcd\n"),
        ("<body>a<!-- </body> -->b</HTML> <!-- c -->", "ab\n"),
        ("<body>a</bodyx>b</body", "ab\n"),
    ],
)
def test_text_after_the_end_of_the_body_is_read(source: str, text: str):
    """As browsers show it: ends in the middle of a page are common."""
    assert html.extract(source, ()).text == text


def test_a_page_with_one_end_is_parsed_as_it_is():
    """Also one that is followed by blanks and comments."""
    source = "<html><body><p>a</p></body>\n<!-- b </body> -->\n</html>\n<!-- c -->"
    assert html._without_ends(source) is source
