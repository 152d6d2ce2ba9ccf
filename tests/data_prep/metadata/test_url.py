"""Addresses: worked examples of the specification, and the faults of the original."""

from datetime import datetime

import pytest

from data_prep.metadata import url
from src.systems.metadata.data.annotations import read_row


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("https://seattlejob.us/finance-internships-miami.html", "seattlejob.us > finance internships miami html"),
        (
            "https://hawkeyesports.com/news/2005/03/22/on-time-and-on-budget/",
            "hawkeyesports.com > news > on time and on budget",
        ),
        (
            "http://www.plumberscrib.com/steam-generators.html?cat=142&x=1",
            "www.plumberscrib.com > steam generators html",
        ),
        ("http://www.example.de/2015/forum/article/21-new-project", "www.example.de > forum > article > new project"),
        ("http://host.org/", "host.org"),
        ("http://host.org", "host.org"),
    ],
)
def test_where_a_page_is_from(address: str, source: str):
    assert url.datasource(address) == source


def test_user_and_password_of_an_address_are_removed():
    row = url.extract({"url": "http://user:s3cret@e.org:8080/priv/x@y?a=b@c"})
    assert row["metadata_url"][0]["value"] == "http://e.org:8080/priv/x@y?a=b@c"
    assert row["metadata_generation_datasource"][0]["value"] == "e.org:8080 > priv > x@y"


def test_b8_reference_loses_words_after_a_number():
    assert (
        url.datasource("http://www.example.de/2015/forum/article/21-new-project", compatible=True)
        == "www.example.de > forum > article"
    )
    assert url.datasource("http://host.org/", compatible=True) == "host.org > "


@pytest.mark.parametrize(
    ("path", "date"),
    [
        ("/1998/03/08/sports/x", "1998-03-08 00:00:00"),
        ("/sports/x", None),
        ("/2021-jan-23-foo", "2021-01-23 00:00:00"),
        ("/p/20190405.html", "2019-04-05 00:00:00"),
        ("/1950/01/02/", None),
        ("/2024/05/06/x", "2024-05-06 00:00:00"),
        ("/2021/01", None),
        ("/a/03-08-1998/b", "1998-03-08 00:00:00"),
        ("/23-december-2010", "2010-12-23 00:00:00"),
        ("/2010/02/31/", None),
        ("/99999999999999/1/2", None),
        ("/marketing/12/2019", None),
        ("/2019/decor/05/", None),
        ("/2019/sept/05/", "2019-09-05 00:00:00"),
    ],
)
def test_a_date_in_an_address(path: str, date: str | None):
    columns = url.extract({"url": f"https://www.nytimes.com{path}"})
    assert [item["value"] for item in columns["metadata_timestamp"]] == ([date] if date else [])
    assert read_row({"text": "", **columns}, "row").columns[:2] == ["url", "generation_datasource"]


@pytest.mark.parametrize(
    ("text", "date"),
    [("2021/jan/23/random text and num 123", "2021-01-23 00:00:00"), ("12", None), ("2021", None), ("2021 jan", None)],
)
def test_a_day_needs_all_its_parts(text: str, date: str | None):
    columns = url.parse_date(text)
    assert (str(columns) if columns else None) == date


def test_no_address():
    assert url.extract({}) == {column: [] for column in url.COLUMNS}
    assert url.date_of("http://[broken/2010/01/02") is None


def test_dates_end_with_the_next_year():
    next_year = datetime.now().year + 1
    assert url.date_of(f"https://a.org/{next_year}/01/02/") == datetime(next_year, 1, 2)
    assert url.date_of(f"https://a.org/{next_year + 1}/01/02/") is None
    assert url.date_of("https://a.org/2021/01/02/", compatible=True) == datetime(2021, 1, 2)
    assert url.date_of("https://a.org/2022/01/02/", compatible=True) is None
