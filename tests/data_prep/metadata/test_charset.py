"""Charsets of pages: declared, guessed and wrong."""

import pytest

from data_prep.metadata.charset import _declared_encoding, _euc_jp_table, decode

TEXTS = {
    "windows-1252": "Die Straße führt über schöne Brücken; fröhliche Lieder – „schön“ – kosten 5 €.",
    "iso-8859-2": "Zażółć gęślą jaźń. Dzisiaj jest ładna pogoda, a jutro będzie padać śnieg w całej Polsce.",
    "windows-1251": "Привет, мир! Это обычная страница о погоде. Сегодня в Москве дождь, а завтра будет солнечно.",
    "koi8-r": "Привет, мир! Это обычная страница о погоде. Сегодня в Москве дождь, а завтра будет солнечно.",
    "shift_jis": "これは日本語のページです。今日の天気は晴れです。①②③ニュースとスポーツについて書いています。",
    "euc-jp": "これは日本語のページです。今日の天気は晴れです。①②③ニュースとスポーツについて書いています。",
    "euc-kr": "안녕하세요. 이것은 한국어 페이지입니다. 오늘 날씨는 맑고 내일은 비가 옵니다.",
    "gb18030": "这是一个中文网页。今天的天气很好,明天会下雨。我们讨论新闻和体育。",
    "big5": "這是一個中文網頁。今天的天氣很好,明天會下雨。我們討論新聞和體育。",
    "utf-8": "Ein Text mit Umlauten: möse, größer, schön, und ein € und ein 漢字.",
}
CODECS = {
    "windows-1252": "cp1252",
    "shift_jis": "cp932",
    "euc-kr": "cp949",
    "big5": "big5hkscs",
    "windows-874": "cp874",
}

SENTENCES = (
    ("windows-1252", "Café crème à emporter, déjà vu, naïve façade, œuvre"),
    ("windows-1252", "Ärger mit Übergrößen? Öffnungszeiten für Mäßige"),
    ("windows-1252", "São Paulo não é a capital; informações e ações"),
    ("windows-1252", "Però è così, perché la città è più bella"),
    ("windows-1252", "Blåbærsyltetøy og rødgrød med fløde på Ærø"),
    ("windows-1252", "Hyvää päivää, tämä on äiti ja mökki järvellä"),
    ("windows-1252", "L'été dernier, “l’Élysée” a annoncé…"),
    ("windows-1252", "Það er gott veður í Reykjavík, þú ert góður"),
    ("iso-8859-2", "Dzień dobry, proszę kliknąć tutaj. Część główna, więcej wiadomości, źródło: własne"),
    ("windows-1250", "Dzień dobry, proszę kliknąć tutaj. Część główna, źródło „własne”"),
    ("iso-8859-2", "Vítejte na našich stránkách, přihlášení uživatele, český překlad"),
    ("windows-1250", "Dobrý deň, viac informácií nájdete v časti ďalšie, šťastie, žiaľ"),
    ("windows-1250", "Šta želite da čitate večeras? Žuta ćuprija, đak"),
    ("iso-8859-2", "Köszönöm szépen, jó reggelt! Az időjárás ma felhős, később eső"),
    ("iso-8859-2", "Bună ziua, aţi găsit ştirile zilei în România"),
    ("iso-8859-9", "Hoş geldiniz, bugün hava çok güzel, yarın yağmur yağacak"),
    ("windows-1257", "Laba diena, šiandien gražus oras, mėgstu žiūrėti į jūrą"),
    ("windows-1257", "Latviešu valodā ir garie patskaņi: ā, ē, ī, ū un mīkstinātie līdzskaņi ķ, ļ, ņ"),
    ("windows-1251", "Добро пожаловать на наш сайт"),
    ("koi8-r", "Добро пожаловать на наш сайт"),
    ("windows-1251", "Добре дошли в нашия сайт. Новини от България"),
    ("windows-1251", "Ласкаво просимо на наш сайт, їжа та її користь"),
    ("windows-1251", "ПОСЛЕДНИЕ НОВОСТИ МОСКВЫ"),
    ("koi8-r", "ПОСЛЕДНИЕ НОВОСТИ МОСКВЫ И РОССИИ"),
    ("iso-8859-7", "Καλώς ήρθατε στην ιστοσελίδα μας"),
    ("windows-1255", "ברוכים הבאים לאתר שלנו"),
    ("windows-1256", "مرحبا بكم في موقعنا"),
    ("gb2312", "欢迎光临我们的网站"),
    ("gb18030", "今天天气真好，我们去公园散步吧。中国人民很友好。"),
    ("big5", "計算機科學與技術"),
    ("big5", "歡迎光臨我們的網站"),
    ("big5", "台灣最大的購物網站，提供各式各樣的商品"),
    ("euc-kr", "안녕하세요"),
    ("euc-kr", "서울의 날씨는 오늘 맑겠습니다"),
    ("euc-kr", "대한민국 축구 국가대표"),
    ("shift_jis", "こんにちは世界"),
    ("euc-jp", "こんにちは世界"),
    ("shift_jis", "株式会社トヨタ自動車"),
    ("euc-jp", "株式会社トヨタ自動車"),
    ("euc-jp", "最新ニュース速報"),
    ("shift_jis", "東京都の天気予報"),
    ("windows-874", "ยินดีต้อนรับสู่เว็บไซต์ของเรา"),
)
"""Short texts in 25 languages."""


def encode(text: str, encoding: str) -> bytes:
    if encoding == "euc-jp":  # Python's codec does not have the numbers in circles
        table = {character: pair.encode("latin-1") for pair, character in _euc_jp_table().items()}
        return b"".join(table.get(character) or character.encode() for character in text)
    return text.encode(CODECS.get(encoding, encoding))


def page(text: str, encoding: str, head: str = "") -> bytes:
    return (
        f"<html><head>{head}<title>a page</title></head><body class='a b'><p>".encode()
        + encode(text, encoding)
        + b"</p></body></html>"
    )


@pytest.mark.parametrize("encoding", TEXTS)
@pytest.mark.parametrize("declaration", ["none", "charset", "http-equiv", "header"])
def test_pages_in_ten_charsets_with_and_without_declaration(encoding: str, declaration: str):
    meta = {
        "charset": f"<META CHARSET='{encoding}'>",
        "http-equiv": f'<meta content="text/html; charset={encoding.upper()}" http-equiv="Content-Type">',
    }
    raw = page(TEXTS[encoding], encoding, meta.get(declaration, ""))
    decoded = decode(raw, f"Text/HTML; Charset={encoding}" if declaration == "header" else "text/html")
    assert TEXTS[encoding] in decoded.text
    assert decoded.encoding == encoding
    assert decoded.is_guess == (declaration == "none")


@pytest.mark.parametrize(("encoding", "text"), SENTENCES)
def test_short_sentences_without_declaration(encoding: str, text: str):
    encoded = encode(text, encoding)
    menu = b"<html><title>Home</title><ul><li><a href='/contact'>Contact</a></ul>"
    for raw in (encoded, page(text, encoding), menu + encoded * 30):
        decoded = decode(raw)
        assert text in decoded.text
        assert decoded.is_guess


@pytest.mark.parametrize(
    "text", ["© 2024", "£ 5", "20±5", "3 m³", "2½ km²", "10 µm", "21 °C", "it’s", "café", "Öl på", "a ÷ b × c"]
)
def test_signs_in_english_text_are_windows_1252(text: str):
    assert text in decode(page(f"English text: {text}", "windows-1252")).text


@pytest.mark.parametrize("encoding", ["utf-16le", "utf-16be"])
@pytest.mark.parametrize("mark", [True, False])
def test_utf_16_with_and_without_byte_order_mark(encoding: str, mark: bool):
    source = f"{chr(0xFEFF) if mark else ''}<html><body><p>Straße und 漢字</p></body></html>"
    decoded = decode(source.encode(encoding))
    assert decoded == (source.removeprefix(chr(0xFEFF)), encoding, not mark)
    assert decode(source.encode("utf-16le"), "text/html; charset=utf-16").text == source.removeprefix(chr(0xFEFF))


@pytest.mark.parametrize(
    ("raw", "header", "text", "encoding"),
    [
        (b"\xef\xbb\xbf<meta charset=koi8-r>\xc3\xb6", "text/html; charset=windows-1251", "ö", "utf-8"),
        (b"<meta charset=utf-8>m\xf6se", "text/html; charset=ISO-8859-1", "möse", "windows-1252"),
        (b"<meta charset=latin1>\x93m\xf6se\x94", "", "“möse”", "windows-1252"),
        (b"<meta charset=us-ascii>m\xf6se", "", "möse", "windows-1252"),
        (b"<meta charset=koi8-r>\xf6", "text/html; charset=no-such-set", "Ж", "koi8-r"),
        (b"<meta charset=no-such-set><meta charset=koi8-r>\xf6", "", "Ж", "koi8-r"),
        (b"<meta charset=utf-16>\xc3\xb6", "", "ö", "utf-8"),
        (b"<meta charset=x-user-defined>\xf6", "", "ö", "windows-1252"),
        (b"<!-- <meta charset=koi8-r> --><meta charset=utf-8>\xc3\xb6", "", "ö", "utf-8"),
        (b"<p title='<meta charset=koi8-r>'><meta charset=utf-8>\xc3\xb6", "", "ö", "utf-8"),
        (b"</meta charset=koi8-r><meta charset=utf-8>\xc3\xb6", "", "ö", "utf-8"),
        (b'<meta name=description content="charset=koi8-r"><meta charset=utf-8>\xc3\xb6', "", "ö", "utf-8"),
        (b'<meta http-equiv=refresh content="charset=koi8-r"><meta charset=utf-8>\xc3\xb6', "", "ö", "utf-8"),
        (b"<meta/charset=koi8-r>\xf6", "", "Ж", "koi8-r"),
        (b"<metadata charset=koi8-r><meta charset=utf-8>\xc3\xb6", "", "ö", "utf-8"),
        (b'<?xml version="1.0" encoding="koi8-r"?><html>\xf6', "", "Ж", "koi8-r"),
        (b"<meta charset=gb2312>\x81\x30\x81\x30\x80", "", "\x80€", "gbk"),
        (b"m\xf6se", 'text/html;charset="iso-8859-1"', "möse", "windows-1252"),
        (b"m\xf6se", "text/html ; x=y ; CHARSET = 'latin1", "möse", "windows-1252"),
        (b"a\xf6", "text/html; charset=x-user-defined", "a\uf7f6", "x-user-defined"),
        (b"\x81", "text/html; charset=windows-1252", "\x81", "windows-1252"),
        (b"\xaa", "text/html; charset=windows-1253", "\ufffd", "windows-1253"),
        (b"\x1b$B$3\x1b(B x", "text/html; charset=iso-2022-jp", "こ x", "iso-2022-jp"),
        (b"\x1b(I1\x1b(B x", "text/html; charset=iso-2022-jp", "\uff71 x", "iso-2022-jp"),
        (b"text", "text/html; charset=hz-gb-2312", "\ufffd", "replacement"),
    ],
)
def test_order_and_labels_of_the_html_standard(raw: bytes, header: str, text: str, encoding: str):
    decoded = decode(raw, header)
    assert decoded.text.endswith(text)
    assert (decoded.encoding, decoded.is_guess) == (encoding, False)


def test_declarations_after_1024_bytes_are_not_read():
    comment = b"<!--" + b"x" * 1100 + b"-->"
    assert decode(comment + b"<meta charset=koi8-r>" + "größer".encode()) == (
        "<!--" + "x" * 1100 + "--><meta charset=koi8-r>größer",
        "utf-8",
        True,
    )
    cut = b"<!--" + b"x" * 1000 + b"-->" + b"<meta charset=koi8-r>" + "größer".encode()
    assert not _declared_encoding(b"<meta charset=koi8-r title='><meta charset=utf-8>"), "an attribute that has no end"
    assert decode(cut).encoding == "utf-8", "a tag that the 1,024 bytes cut off does not count"


def test_short_pages_without_declaration():
    assert decode(b"<p>m\xf6se</p>") == ("<p>möse</p>", "windows-1252", True)
    assert decode("<p>möse</p>".encode()) == ("<p>möse</p>", "utf-8", True)
    assert decode(b"<p>text</p>") == ("<p>text</p>", "utf-8", False), "ASCII is the same in every candidate"


def test_utf_8_with_a_broken_character_stays_utf_8():
    text = "größer und schöner " * 20
    decoded = decode(f"<p>{text}".encode() + b"\xff</p>" + "漢".encode()[:2])
    assert decoded.encoding == "utf-8"
    assert text in decoded.text
    assert decoded.text.count("\ufffd") == 2
