"""Split text into sentences without downloads, by nltk's Punkt (Kiss & Strunk 2006) with a list of abbreviations.

Punkt's trained models must be downloaded. Without one it knows numbers and initials but no abbreviations, so the most
frequent English ones are listed here. The split depends only on the text, not on a corpus.
"""

import re
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

_SHORT = """
a.m adm al apr approx assn aug ave bldg blvd capt cf cmdr co col corp dec dept dr e.g ed eds eq eqs esp est etc
feb fig figs ft gen gov hon i.e inc jan jr lt ltd maj messrs mr mrs ms mt nov oct op p.m pp prof pt rd ref refs rep rev
sec sen sep sept sgt sr st u.k u.n u.s vol vols vs
"""
ABBREVIATIONS = frozenset(_SHORT.split())
"""Abbreviations in lower case, without the final period."""
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def split(text: str) -> list[str]:
    """Split `text` into sentences, which concatenate to `text`; an empty list if there is only white space.

    Each sentence includes the white space before it, and none is only white space. A sentence also ends before an empty
    line, as headings and code have no period.
    """
    ends = {end for _, end in _punkt().span_tokenize(text)} | {match.start() for match in _BLANK_LINE.finditer(text)}
    bounds = [0]
    for end in sorted(ends):
        if text[bounds[-1] : end].strip():
            bounds.append(end)
    if len(bounds) > 1 and not text[bounds[-1] :].strip():
        bounds.pop()
    return [text[start:end] for start, end in pairwise([*bounds, len(text)])] if text.strip() else []


@cache
def _punkt() -> "PunktSentenceTokenizer":
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS)
    return PunktSentenceTokenizer(parameters)
