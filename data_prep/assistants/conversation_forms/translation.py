"""Convert pairs of texts in two languages to translation requests.
Direction and wording depend only on the pair of texts."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pydantic import field_validator

from data_prep.assistants.conversation_forms.rows import Form, Row, column, pick, text_of
from src.errors import DataError
from src.experiments.config import unknown_text
from src.files import ROOT, read_yaml

REQUESTS = ROOT / "resources" / "conversations" / "requests" / "translation.yaml"
_THREE_LETTERS = {"ara": "ar", "ita": "it", "nld": "nl", "tur": "tr", "ukr": "uk", "vie": "vi"}


@lru_cache
def load_requests() -> dict[str, Any]:
    """{"english": requests in English, "languages": {code: {"name", "own": requests in the language}}}.
    Each request contains {text} and {language}."""
    return read_yaml(REQUESTS, "requests")


class Translations(Form):
    """{"translation": {code: text, code: text}}."""

    pair: str
    """Codes of the two languages, such as "de-en"."""

    @field_validator("pair")
    @classmethod
    def _check_pair(cls, value: str) -> str:
        codes = _codes(value)
        if len(codes) != 2 or codes[0] == codes[1]:
            raise ValueError(f"expected two codes such as de-en, got {value!r}.")
        for code in codes:
            if code not in load_requests()["languages"]:
                raise ValueError(
                    unknown_text("language", code, load_requests()["languages"], str(REQUESTS.relative_to(ROOT)))
                )
        return value

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        texts = column(row, "translation", where)
        if not isinstance(texts, dict):
            raise DataError(
                f"{where}: column 'translation': expected a text for each language, got {type(texts).__name__}."
            )
        yield from translate({code: text_of(texts, code, f"{where}: translation") for code in _codes(self.pair)})


class DiveMT(Form):
    """{"subject_id": "ita_…", "src_text", "tgt_text"}: translations from English into the language of "subject_id"."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        code = text_of(row, "subject_id", where).partition("_")[0]
        if code not in _THREE_LETTERS:
            raise DataError(f"{where}: subject_id: {unknown_text('language', code, _THREE_LETTERS)}")
        yield from translate(
            {"en": text_of(row, "src_text", where), _THREE_LETTERS[code]: text_of(row, "tgt_text", where)}
        )


def _codes(pair: str) -> list[str]:
    """Split a pair into language codes; "tw" belongs to the code before it: "zh-tw-en" is zh-tw and en."""
    codes = list[str]()
    for code in pair.split("-"):
        if code == "tw" and codes:
            codes[-1] += "-tw"
        else:
            codes.append(code)
    return codes


def translate(texts: dict[str, str]) -> Iterator[Row]:
    """Yield a row with a request to translate one of two texts into the other, unless one is empty.
    texts: {language code: text}."""
    if not all(text.strip() for text in texts.values()):
        return
    requests, codes = load_requests(), list(texts)
    source, target = pick([codes, codes[::-1]], "direction", texts)
    language = requests["languages"][target]
    request = pick([*requests["english"], *language["own"]], "request", texts)
    request = request.replace("{language}", language["name"]).replace("{text}", texts[source])
    answer = {"role": "assistant", "content": texts[target], "lang": target}
    yield {"messages": [{"role": "user", "content": request}, answer]}
