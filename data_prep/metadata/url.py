"""What the address of a page tells: itself, where it is from, and sometimes a date (BigScience's rules, mended where they lose text)."""

import calendar
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import unquote, urlsplit

Row = dict[str, Any]
COLUMNS = ("metadata_url", "metadata_generation_datasource", "metadata_timestamp")
YEARS = range(1983, 2022)
"""Years of the pages that a date is believed for."""
_MONTHS = {name.lower(): number for number in range(1, 13) for name in (calendar.month_name[number], calendar.month_abbr[number])}
_MONTHS["sept"] = 9
_PART = re.compile(r"[-_+.&=]")


def extract(row: Mapping[str, Any], compatible: bool = False) -> Row:
    """The columns of a row with a "url"; empty lists where there is none. compatible: with the faults of the original."""
    url = row.get("url")
    if not isinstance(url, str) or not url:
        return {column: [] for column in COLUMNS}
    date, source = date_of(url), datasource(url, compatible)
    return {
        "metadata_url": [_item("url", url)],
        "metadata_generation_datasource": [_item("datasource", source)] if source else [],
        "metadata_timestamp": [_item("timestamp", str(date))] if date else [],
    }


def _item(key: str, value: str) -> Row:
    return {"key": key, "type": "global", "value": value}


def datasource(url: str, compatible: bool = False) -> str:
    """The host and the words of each part of the path, "host > part > part", without numbers at the ends of a part; empty of no address.

    compatible: of a part that begins with a number nothing is left, and an empty path leaves " > ".
    """
    try:
        split = urlsplit(url)
    except ValueError:  # such as brackets that hold no address
        return ""
    parts = [words for part in split.path.split("/") if (words := _words(part, compatible))]
    if compatible and not parts:
        return f"{split.netloc} > "
    return " > ".join([split.netloc, *parts])


def _words(part: str, compatible: bool) -> str:
    words = [word for word in _PART.split(unquote(part)) if word or compatible]
    if compatible:
        words = words[:1] if words[0].isdigit() else words
        words = words[:-1] if words[-1].isdigit() else words
        return " ".join(words)
    while words and words[0].isdigit():
        words = words[1:]
    while words and words[-1].isdigit():
        words = words[:-1]
    return " ".join(words)


def date_of(url: str) -> datetime | None:
    """The first date with year, month and day in the path of an address, if it is of `YEARS`."""
    try:
        path = unquote(urlsplit(url).path)
    except ValueError:  # such as brackets that hold no address
        return None
    found = parse_date(path)
    return found if found and found.year in YEARS else None


def parse_date(text: str) -> datetime | None:
    """The first day in a text that is written with its year, month and day; other numbers and words are passed over."""
    words = re.findall(r"\d+|[a-z]+", text.lower())
    for place, word in enumerate(words):
        if re.fullmatch(r"(19|20)\d{6}", word):
            found = _day(word[:4], word[4:6], word[6:])
        else:
            found = _day_of_three(words[place : place + 3])
        if found:
            return found
    return None


def _day_of_three(words: list[str]) -> datetime | None:
    """Year, month and day in one of the orders Y-M-D, M-D-Y and D-M-Y."""
    if len(words) < 3:
        return None
    first, second, third = words
    orders = ((first, second, third), (third, first, second), (third, second, first))
    return next((found for order in orders if (found := _day(*order))), None)


def _day(year: str, month: str, day: str) -> datetime | None:
    number = _MONTHS.get(month) if month.isalpha() else int(month) if len(month) <= 2 else None
    if number is None or not re.fullmatch(r"\d{4}", year) or not re.fullmatch(r"\d{1,2}", day):
        return None
    try:
        return datetime(int(year), number, int(day))
    except ValueError:
        return None
