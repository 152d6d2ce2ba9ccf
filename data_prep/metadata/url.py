"""Extract address, source and date from a page's URL (BigScience's rules, fixed where they lose text)."""

import calendar
import re
from collections.abc import Mapping
from datetime import datetime
from itertools import dropwhile
from typing import Any
from urllib.parse import unquote, urlsplit

Row = dict[str, Any]
COLUMNS = ("metadata_url", "metadata_generation_datasource", "metadata_timestamp")
FIRST_YEAR = 1983
"""Earlier dates are ignored."""
_LAST_YEAR_OF_REFERENCE = 2021
_MONTHS = {
    name.lower(): number
    for number in range(1, 13)
    for name in (calendar.month_name[number], calendar.month_abbr[number])
}
_MONTHS["sept"] = 9
_USER = re.compile(r"^(\s*[\w+.-]+://)[^/?#]*@")
"""User and password of an address, which a model must not learn."""
_PART = re.compile(r"[-_+.&=]")


def extract(row: Mapping[str, Any], compatible: bool = False) -> Row:
    """Make the columns of a row with a "url"; empty lists without one. compatible: reproduce the reference's faults."""
    url = row.get("url")
    if not isinstance(url, str) or not url:
        return {column: [] for column in COLUMNS}
    url = url if compatible else _USER.sub(r"\1", url)
    date, source = date_of(url, compatible), datasource(url, compatible)
    return {
        "metadata_url": [_item("url", url)],
        "metadata_generation_datasource": [_item("datasource", source)] if source else [],
        "metadata_timestamp": [_item("timestamp", str(date))] if date else [],
    }


def _item(key: str, value: str) -> Row:
    return {"key": key, "type": "global", "value": value}


def datasource(url: str, compatible: bool = False) -> str:
    """Return the host and the words of each part of the path, "host > part > part", without numbers at their ends.

    The result is empty for an invalid address. compatible: a part that starts with a number is empty, and an empty path
    leaves " > ".
    """
    try:
        split = urlsplit(url)
    except ValueError:  # such as brackets without an address
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
    words = list(dropwhile(str.isdigit, words))
    return " ".join([*dropwhile(str.isdigit, reversed(words))][::-1])


def last_year(compatible: bool = False) -> int:
    """Last plausible year of a date: next year, for announcements. compatible: the last year of the reference."""
    return _LAST_YEAR_OF_REFERENCE if compatible else datetime.now().year + 1


def date_of(url: str, compatible: bool = False) -> datetime | None:
    """Return the first date with year, month and day in the path of an address, if its year is plausible."""
    try:
        path = unquote(urlsplit(url).path)
    except ValueError:  # such as brackets without an address
        return None
    date = parse_date(path)
    return date if date and FIRST_YEAR <= date.year <= last_year(compatible) else None


def parse_date(text: str) -> datetime | None:
    """Return the first date with year, month and day in a text; skip other numbers and words."""
    words = re.findall(r"\d+|[a-z]+", text.lower())
    for place, word in enumerate(words):
        if re.fullmatch(r"(19|20)\d{6}", word):
            day = _day(word[:4], word[4:6], word[6:])
        else:
            day = _day_of_three(words[place : place + 3])
        if day:
            return day
    return None


def _day_of_three(words: list[str]) -> datetime | None:
    """Parse year, month and day in one of the orders Y-M-D, M-D-Y and D-M-Y."""
    if len(words) < 3:
        return None
    first, second, third = words
    orders = ((first, second, third), (third, first, second), (third, second, first))
    return next((day for order in orders if (day := _day(*order))), None)


def _day(year: str, month: str, day: str) -> datetime | None:
    number = _MONTHS.get(month) if month.isalpha() else int(month) if len(month) <= 2 else None
    if number is None or not re.fullmatch(r"\d{4}", year) or not re.fullmatch(r"\d{1,2}", day):
        return None
    try:
        return datetime(int(year), number, int(day))
    except ValueError:
        return None
