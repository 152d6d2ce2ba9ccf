"""Text and tags of pages."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from data_prep.metadata.html import RemovalRule, extract, read_rules
from src.data.metadata.annotations import read_row
from src.data.metadata.linearise import insert, markers
from src.data.metadata.processors import HtmlFilter, local_markers
from src.errors import DataError


UNLIMITED = [rule for rule in read_rules() if rule.max_chars is None]
"""Without the rules for short blocks."""


def tags(source: str, rules: Sequence[RemovalRule] = UNLIMITED) -> tuple[str, dict[str, list[str]]]:
    """Return the text, and the texts in each tag."""
    page = extract(source, rules)
    found: dict[str, list[str]] = {}
    for tag in page.tags:
        found.setdefault(tag["value"], []).append(page.text[tag["char_start_idx"] : tag["char_end_idx"]])
    return page.text, found


def test_a_title():
    text, found = tags("<html>\n<head>\n</head>\n<body>\n<h1>This is a title</h1>\n</body>\n</html>")
    assert text == "This is a title\n"
    assert found == {"h1": ["This is a title"], "body": ["This is a title\n"]}


def test_nested_divisions():
    source = "<body><h1>T</h1><div><p>x</p>This is a <div>first</div> sub-div in div</div></body>"
    text, found = tags(source)
    assert text == "T\nx\nThis is a\nfirst\nsub-div in div\n"
    assert found["div"] == ["first", "x\nThis is a\nfirst\nsub-div in div"]


def test_chains_of_divisions_are_one():
    text, found = tags(
        '<body><h1>this is a title that we keep</h1><div class="div-level-1" id=1>blablabla<div class="div-level-2" href="http">tidi '
        "<div id=3>tidi2</div></div></div></body>"
    )
    assert text == "this is a title that we keep\nblablabla\ntidi\ntidi2\n"
    assert {name: len(each) for name, each in found.items()} == {"h1": 1, "div": 1, "body": 1}
    page = extract("<body>aaa <div class=a id=1>b<div class=c href=http>d <div id=3>e</div></div></div></body>", UNLIMITED)
    assert page.tags[0]["html_attrs"] == {"attrs": ["class", "id", "href"], "values": ["a c", "1 3", "http"]}


def test_short_blocks_go_and_what_is_hidden_does_not_make_them_long():
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


def test_tags_that_go_with_all_that_they_hold():
    """M30."""
    inside, outside = "<div><p>This is a paragraph in a div</p></div>", "<p>This is a paragraph not in div</p>"
    page = extract(f"<html><body><h1>This is a title</h1>{inside}{outside}</body></html>", [RemovalRule(tag="div")])
    assert page.text == "This is a title\nThis is a paragraph not in div\n"
    assert len(page.tags) == 3


def test_a_chain_of_divisions_around_all_that_is_read():
    """M40, page 4: the chain is one division with the attributes of both, inside the body, of the same 80 characters."""
    words = "tidi tadada tidi tadada tidi tadada tidi tadada tidi tadada tidi tadada tidi ta"
    page = extract(f'<html><body><div class="div-level-1"><div class="div-level-2">{words}</div></div></body></html>')
    assert page.text == f"{words}\n"
    assert len(page.text) == 80
    found = {tag["value"]: tag for tag in page.tags}
    place = ("char_start_idx", "char_end_idx", "relative_start_pos", "relative_end_pos")
    assert [found["div"][name] for name in place] == [0, 80, 1, 0]
    assert [found["body"][name] for name in place] == [0, 80, 0, 1]
    assert found["div"]["html_attrs"] == {"attrs": ["class"], "values": ["div-level-1 div-level-2"]}
    assert len(page.tags) == 2


def test_footers_outside_the_body_are_all_kept():
    """M40: they are strings of their own, and no text."""
    page = extract(f"<html><body><p>{'words ' * 20}</p></body><footer>one</footer><footer>two</footer></html>")
    assert page.footer == ["<footer>one</footer>", "<footer>two</footer>"]
    assert "one" not in page.text


def test_whitespace_breaks_and_preformatted_text():
    source = "<body> a  b\n c<br>d<pre> e\n  f</pre><span>g\u00a0\u00a0h</span><td>i</td>j</body>"
    assert tags(source)[0] == "a b c\nd\n e\n  f\ng h i j\n"


def test_head_footer_and_title_are_kept_as_they_are():
    page = extract('<html><head><meta charset="utf-8"><title>T</title></head><body><footer>one</footer>text</body></html>', UNLIMITED)
    assert page.head == ['<head><meta charset="utf-8"/><title>T</title></head>'], "M40: serialised anew"
    assert page.title == ["<title>T</title>"]
    assert page.footer == ["<footer>one</footer>"]
    assert "<title>" in page.head[0]
    assert page.text == "text\n"


@pytest.mark.parametrize("source", ["", "  ", "<!-- nothing -->"])
def test_no_page(source: str):
    with pytest.raises(DataError, match="no HTML can be read"):
        extract(source)


def test_a_page_that_is_ten_thousand_deep():
    page = extract("<body>" + "<b>" * 1000 + "deep" + "</b>" * 1000 + "</body>", UNLIMITED)
    assert (page.text, len(page.tags)) == ("deep\n", 1001)
    with pytest.raises(DataError, match="nested too deep"):
        extract("<body>" + "<b>" * 10_000 + "deep" + "</b>" * 10_000 + "</body>", UNLIMITED)


def random_page(seed: int) -> str:
    draw = random.Random(seed)

    def element(depth: int) -> str:
        name = draw.choice(["p", "div", "b", "i", "td", "table", "pre", "br", "img", "ul", "li", "script", "a class=x"])
        inside = "".join(draw.choice([" word ", "<", "&lt;b&gt;", "\n", "é", "", "[[x]]"]) for _ in range(draw.randrange(3)))
        inner = "".join(element(depth + 1) for _ in range(draw.randrange(3) if depth < 4 else 0))
        end = "" if draw.random() < 0.1 else f"</{name.split()[0]}>"
        return f"<{name}>{inside}{inner}{end}{draw.choice(['', ' tail ', 'tail'])}"

    return f"<body>{''.join(element(0) for _ in range(4))}</body>"


def test_spans_of_any_page_can_be_written_and_taken_out_again():
    for seed in range(300):
        page = extract(random_page(seed), UNLIMITED)
        found = read_row({"text": page.text, "metadata_html": page.tags}, "row")

        def process(item: Any) -> Any:
            return local_markers(item, HtmlFilter(), "end")

        both = [insert(found.text, markers(found, ["html"], process, {}, how)) for how in ("nested", "compatible")]
        for seen in both:
            assert "".join(c for c, m in zip(*seen, strict=True) if not m) == page.text
        assert both[0].text.replace("\\", "") == both[1].text.replace("\\", ""), "tags of a page nest"
