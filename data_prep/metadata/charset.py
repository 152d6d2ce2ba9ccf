"""Decode web pages as the HTML standard does.

The order is that of its encoding sniffing algorithm: byte order mark, HTTP header, declaration in the first 1,024
bytes, detection, windows-1252. Labels have their meaning on the web: ISO-8859-1 is windows-1252, gb2312 is gb18030.
"""

import codecs
import re
from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

PRESCAN_BYTES = 1024
DETECTION_BYTES = 1 << 13
"""Maximum number of bytes of non-ASCII words that detection reads."""
FALLBACK = "windows-1252"
REPLACEMENT = "\ufffd"
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_BE, "utf-16be"), (codecs.BOM_UTF16_LE, "utf-16le"))
_HEADER_CHARSET = re.compile(r"""(?i);\s*charset\s*=\s*(?:"([^"]*)"|'([^']*)'|["']?([^\s"';,]+))""")
_CONTENT_CHARSET = re.compile(
    rb"""(?i)charset[\t\n\f\r ]*=[\t\n\f\r ]*(?:"([^"]*)"|'([^']*)'|([^"'\t\n\f\r ;][^\t\n\f\r ;]*))"""
)
_XML_ENCODING = re.compile(rb"""\A<\?xml[^>]*?encoding[\x00-\x20]*=[\x00-\x20]*(["'])([^>"']*?)\1[^>]*>""")
_UTF_16_XML = ((b"<\0?\0x\0", "utf-16le"), (b"\0<\0?\0x", "utf-16be"))
_MARKUP = re.compile(rb"<[^<>]*>|[\t\n\f\r <>]+")
_TAG = re.compile(rb"<(/?)([A-Za-z][^\t\n\f\r />]*)(?=[\t\n\f\r />])")
_ATTRIBUTE = re.compile(
    rb"""[\t\n\f\r /]*(?P<name>[^\t\n\f\r />][^\t\n\f\r />=]*)"""
    rb"""(?:[\t\n\f\r ]*=[\t\n\f\r ]*(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|"""
    rb"""(?P<bare>[^\t\n\f\r >"'][^\t\n\f\r >]*)|["'](?s:.*)|(?=>)))?"""
)
_SIGN = re.compile(
    rb"[^A-Za-z\x80-\xff]*(?:[\x80-\xff]|[A-Za-z]{0,2}[\xb0-\xb9\xbc-\xbe][A-Za-z]{0,2})[^A-Za-z\x80-\xff]*"
)
"""Word with one sign, such as ©, m³ or 20±5 in windows-1252. In other encodings, the sign would be a letter."""
_LATIN = ("windows-1252", "iso-8859-2", "windows-1250", "windows-1254", "windows-1257", "windows-1258")
"""Candidates for words with few non-ASCII bytes. If several fit a text, the first one is used."""
_NOT_LATIN = {
    "gb18030": "gb18030",
    "big5hkscs": "big5",
    "cp949": "euc-kr",
    "cp1251": "windows-1251",
    "koi8_r": "koi8-r",
    "koi8_u": "koi8-u",
    "iso8859_5": "iso-8859-5",
    "cp866": "ibm866",
    "mac_cyrillic": "x-mac-cyrillic",
    "cp1253": "windows-1253",
    "iso8859_7": "iso-8859-7",
    "cp1255": "windows-1255",
    "iso8859_8": "iso-8859-8",
    "cp1256": "windows-1256",
    "iso8859_6": "iso-8859-6",
    "cp874": "windows-874",
    "cp932": "shift_jis",
}
"""Candidates for all other words."""
LATIN_SHARE = 0.4
"""Maximum share of non-ASCII bytes in the words of a Latin page."""
MIN_FREQUENT = 0.1
"""Minimum share of frequent characters in Chinese, Japanese and Korean."""
_KANA = frozenset(map(chr, [*range(0x3041, 0x3094), *range(0x30A1, 0x30FD)]))
_CHINESE = frozenset(
    "的一是不了在人有我他中来來上大为為和国國地到以說说时時要就出会會可也你生能而子得下自之年过過发發后後作里用新日天這这個个們们"
)
_KOREAN = frozenset("이다에의는로하을가고지서한은기으년대사시를리도인스일니습")
_EAST_ASIAN = {"euc-jp": _KANA, "shift_jis": _KANA, "gb18030": _CHINESE, "big5": _CHINESE, "euc-kr": _KOREAN}
"""{encoding: frequent characters of its language}. charset-normalizer mistakes short Chinese texts for Thai,
and rejects Japanese pages with characters that are missing in Python's codecs."""
_FREQUENT = frozenset("оеаинтсрвлкατοιενρσκηςάίόיוהלרבתמאשاليمونرتبةานรอกเงมยลวดทสต")
"""Frequent letters in Cyrillic, Greek, Hebrew, Arabic and Thai."""
_PUNCTUATION = "„“”‚‘’‹›«»–—…•·¿¡§¦°©®™€£ªº\xa0"
_ALPHABETS = tuple(
    frozenset(alphabet + _PUNCTUATION)
    for alphabet in (
        "äöüß",
        "àâæçèéêëîïôœùûüÿ",
        "áéíñóúü",
        "àáâãçéêíóôõúü",
        "àáçéèìíïñòóùúü",
        "åäöéæøü",
        "áéèíïóöëü",
        "áéíóúýðþæö",
        "äöõüšž",
        "ąćęłńóśźż",
        "áčďéěíňóřšťúůýž",
        "áäčďéíĺľňóôŕšťúýž",
        "áéíóöőúüű",
        "čćđšž",
        "ăâîșțşţ",
        "çğıöşüâîûi\u0307",
        "ąčęėįšųūž",
        "āčēģīķļņšūž",
        "ăâđêôơưáàéèíóòúùý\u0300\u0301\u0303\u0309\u0323",
    )
)
"""Lower-case letters and punctuation outside ASCII by language, for encodings of Latin letters."""


class Decoded(NamedTuple):
    """Decoded page."""

    text: str
    encoding: str
    """Name in the Encoding standard, in lower case."""
    is_guess: bool
    """Whether detection or the fallback chose the encoding. False for ASCII, which is the same in all candidates."""


def decode(page: bytes, content_type: str = "") -> Decoded:
    """Decode a page. content_type: value of its HTTP header `Content-Type`."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if page.startswith(mark):
            return Decoded(_decode_as(page[len(mark) :], encoding), encoding, False)
    encoding = _header_encoding(content_type) or _declared_encoding(page[:PRESCAN_BYTES])
    if encoding:
        return Decoded(_decode_as(page, encoding), encoding, False)
    if page.isascii() and b"\0" not in page and b"\x1b" not in page:
        return Decoded(page.decode("ascii"), "utf-8", False)
    encoding = _detect(page)
    return Decoded(_decode_as(page, encoding), encoding, True)


def _look_up(label: str) -> str | None:
    """Name of the encoding with this label, in lower case; None for an unknown label."""
    import webencodings

    encoding = webencodings.lookup(label)
    return encoding.name.lower() if encoding else None


def _header_encoding(content_type: str) -> str | None:
    labels = ("".join(match.groups("")) for match in _HEADER_CHARSET.finditer(f";{content_type}"))
    return next((encoding for label in labels if (encoding := _look_up(label))), None)


def _declared_encoding(start: bytes) -> str | None:
    """Prescan the start of a page for a declaration.

    As in the standard, UTF-16 means UTF-8: a declaration in ASCII bytes cannot be UTF-16.
    """
    for pattern, encoding in _UTF_16_XML:
        if start.startswith(pattern):
            return encoding
    encoding = next((encoding for label in _meta_labels(start) if (encoding := _look_up(label))), None)
    if encoding is None and (match := _XML_ENCODING.match(start)):
        encoding = _look_up(match[2].decode("latin-1"))
    if encoding == "x-user-defined":
        return FALLBACK
    return "utf-8" if encoding in ("utf-16le", "utf-16be") else encoding


def _meta_labels(start: bytes) -> Iterator[str]:
    """Charset labels of `meta` elements, in order."""
    at = 0
    while (at := start.find(b"<", at)) >= 0:
        if start.startswith(b"<!--", at):
            end = start.find(b"-->", at + 2)
            at = end + 3 if end >= 0 else len(start)
        elif match := _TAG.match(start, at):
            attributes, at = _attributes(start, match.end())
            if not match[1] and match[2].lower() == b"meta" and at < len(start):
                yield from _meta_label(attributes)
        elif start[at + 1 : at + 2] in (b"!", b"/", b"?"):
            end = start.find(b">", at)
            at = end + 1 if end >= 0 else len(start)
        else:
            at += 1


def _attributes(start: bytes, at: int) -> tuple[dict[bytes, bytes], int]:
    """Read the attributes of a tag after its name, which ends at `at`.

    Returns the attributes and the end of the tag; the length of `start` if the tag is cut off.
    """
    attributes = dict[bytes, bytes]()
    while match := _ATTRIBUTE.match(start, at):
        value = match["double"] or match["single"] or match["bare"] or b""
        attributes.setdefault(match["name"].lower(), value)
        at = match.end()
    rest = start[at:].lstrip(b"\t\n\f\r /")
    return attributes, len(start) - len(rest) if rest.startswith(b">") else len(start)


def _meta_label(attributes: dict[bytes, bytes]) -> Iterator[str]:
    if b"charset" in attributes:
        yield attributes[b"charset"].decode("latin-1")
        return
    match = _CONTENT_CHARSET.search(attributes.get(b"content", b""))
    if match and attributes.get(b"http-equiv", b"").lower() == b"content-type":
        yield b"".join(match.groups(b"")).decode("latin-1")


def _detect(page: bytes) -> str:
    """Guess UTF-16, ISO-2022-JP, UTF-8 by bytes, Latin and East Asian by letters, the rest by charset-normalizer."""
    import charset_normalizer

    zeros = [page[side::2].count(0) for side in range(2)]
    if max(zeros) > max(len(page) / 100, 9 * min(zeros)):  # in UTF-16, every second byte of ASCII markup is 0
        return "utf-16be" if zeros[0] > zeros[1] else "utf-16le"
    if re.search(rb"\x1b\$[@B]", page):
        return "iso-2022-jp"
    text = page.decode("utf-8", "replace")
    if text.count(REPLACEMENT) * 20 <= len(text) - len(
        text.encode("ascii", "ignore")
    ):  # a page cut within a character is UTF-8, too
        return "utf-8"
    words = b" ".join([word for word in _MARKUP.split(page) if not word.isascii() and not _SIGN.fullmatch(word)])
    if not words:
        return FALLBACK
    start = words[:DETECTION_BYTES]
    if sum(byte > 0x7F for byte in start) < LATIN_SHARE * len(start) or not re.search(rb"[\x80-\xff]{2}", start):
        return max(_LATIN, key=lambda encoding: _share(_decode_as(start, encoding), *_ALPHABETS))
    by_share = {encoding: _share(_decode_as(start, encoding), frequent) for encoding, frequent in _EAST_ASIAN.items()}
    if max(by_share.values()) >= MIN_FREQUENT:
        return max(by_share, key=lambda encoding: by_share[encoding])
    # A character of two or four bytes can be cut off at the end, which no codec would accept.
    ends = [DETECTION_BYTES - cut for cut in range(4)] if len(words) > DETECTION_BYTES else [len(words)]
    options: dict[str, Any] = {"steps": 1, "chunk_size": DETECTION_BYTES, "cp_isolation": list(_NOT_LATIN)}
    matches = [match for end in ends for match in charset_normalizer.from_bytes(words[:end], **options)]
    candidates = {name for match in matches for name in match.could_be_from_charset}
    encodings = [encoding for name, encoding in _NOT_LATIN.items() if name in candidates]
    return max(encodings, key=lambda encoding: _share(_decode_as(start, encoding), _FREQUENT), default=FALLBACK)


def _share(text: str, *alphabets: Collection[str]) -> float:
    """Maximum over `alphabets` of the share of non-ASCII characters that are in the alphabet.

    0 for a text with replacement characters, because it is in another encoding.
    """
    characters = Counter(character for character in text.lower() if character > "\x7f")
    best = max(sum(count for character, count in characters.items() if character in alphabet) for alphabet in alphabets)
    return best / characters.total() if best > characters[REPLACEMENT] * 10 else 0.0


def _decode_as(page: bytes, encoding: str) -> str:
    """Decode as in the Encoding standard; undefined bytes become replacement characters."""
    import webencodings

    if encoding == "replacement":
        return REPLACEMENT
    if encoding == "iso-2022-jp":
        page, encoding = _as_euc_jp(page), "euc-jp"
    if encoding == "euc-jp":
        table = _euc_jp_table()
        return _EUC_JP.sub(lambda match: table.get(match[0], REPLACEMENT), page.decode("latin-1"))
    codec = webencodings.lookup("gb18030" if encoding == "gbk" else encoding)
    assert codec is not None
    return codec.codec_info.decode(page, "web" if encoding.startswith(("windows-", "gb")) else "replace")[0]


def _decode_undefined(error: UnicodeError) -> tuple[str, int]:
    """Decode a byte that Python leaves undefined: in Windows code pages, 80 to 9F are control characters;
    in GB 18030, 80 is the euro."""
    assert isinstance(error, UnicodeDecodeError)
    byte = error.object[error.start]
    if error.encoding.startswith("gb"):
        return "€" if byte == 0x80 else REPLACEMENT, error.start + 1
    return chr(byte) if byte < 0xA0 else REPLACEMENT, error.start + 1


codecs.register_error("web", _decode_undefined)
_EUC_JP = re.compile("[\xa1-\xfe]{2}|\x8e[\xa1-\xdf]|\x8f[\xa1-\xfe]{2}|[\x80-\xff]")


@lru_cache(1)
def _euc_jp_table() -> dict[str, str]:
    """Map the bytes of EUC-JP to characters, including Microsoft's extensions that are missing in Python's codec."""
    table = {f"\x8e{chr(byte)}": chr(0xFF61 - 0xA1 + byte) for byte in range(0xA1, 0xE0)}
    for row in range(94):
        for cell in range(94):
            pair = bytes([0xA1 + row, 0xA1 + cell])
            lead, trail = (
                0x81 + row // 2 + (0x40 if row >= 62 else 0),
                cell + (0x9F if row % 2 else 0x40 + (cell >= 63)),
            )
            for key, encoded, codec in (
                (pair, bytes([lead, trail]), "cp932"),
                (b"\x8f" + pair, b"\x8f" + pair, "euc_jp"),
            ):
                character = encoded.decode(codec, "ignore")
                if len(character) == 1:
                    table[key.decode("latin-1")] = character
    return table


def _as_euc_jp(page: bytes) -> bytes:
    """Convert ISO-2022-JP to EUC-JP."""

    def convert(match: re.Match[bytes]) -> bytes:
        shifted = bytes(byte | 0x80 if 0x20 < byte < 0x7F else byte for byte in match[2])
        if match[1] == b"(I":
            return re.sub(rb"[\xa1-\xdf]", b"\x8e\\g<0>", shifted)
        return shifted if match[1].startswith(b"$") else match[2]

    return re.sub(rb"\x1b(\$[@B]|\([BJI])([^\x1b]*)", convert, page)
