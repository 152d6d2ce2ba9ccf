"""Documents as conversations, written by the tokenizer's chat template with loss only on answers.

Images and prompts are the user's, texts the assistant's. The ids are those of a processor's `apply_chat_template`,
except that text of messages never becomes a control token.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.data.text.spans import Span, SpanEncoder, render_template
from src.errors import DataError
from src.systems.interleaved.streaming import images, manifest, tar_index
from src.systems.interleaved.streaming.manifest import Manifest, Shard
from src.systems.interleaved.streaming.tar_index import GOOD, IMAGE, PROMPT, REASONS, SYSTEM, TEXT, TarIndex
from src.systems.interleaved.streaming.texts import TextTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLE_OF = {SYSTEM: "system", IMAGE: "user", PROMPT: "user", TEXT: "assistant"}
"""Role of the message that a part belongs to, by its kind. Adjacent parts of one role are one message."""
_BAD = (tar_index.NO_TEXT, tar_index.NO_FIELDS, tar_index.NO_CHAT, tar_index.OTHER_IMAGES)
_MARK = "\x02"
"""Delimiter of a part's number, which replaces its text while the template is rendered."""
_PLACE = re.compile(f"{_MARK}([0-9]+){_MARK}|{re.escape(images.IMAGE)}")
_TEXT = "\n One <&'\t> </think> \n"
_PROBE = ((IMAGE, ""), (PROMPT, _TEXT), (TEXT, _TEXT), (PROMPT, _TEXT), (IMAGE, ""), (TEXT, _TEXT))


class _Encoder(SpanEncoder):
    """Encodes spans with roles 2 * part, + 1 for tokens of an answer."""

    def is_answer(self, role: int) -> bool:
        return role % 2 == 1

    def until_control(self, text: str) -> list[str]:
        """The pieces of a text up to its last control token; none if it has none."""
        return self._controls.split(text)[:-1]


class ChatTokens(TextTokens):
    """Tokenizes the texts of documents together with the chat template between them.

    The ids of a part start with those of the template before it, such as the end of the last message; an image's are
    only these. The last part ends with the rest of the template.
    """

    is_chat = True

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", style: str = "idefics3", where: str = "chat") -> None:
        """style: see `TextTokens`. where: path of the setting, for error messages.

        Raises:
            DataError: the tokenizer has no chat template, or it cannot be trained with.
        """
        super().__init__(tokenizer, style)
        self.begin, self.end = [], []
        self._where, self._source = where, tokenizer.chat_template
        if not isinstance(self._source, str):
            raise DataError(
                f"{where}: {tokenizer.name_or_path or 'the tokenizer'} has no chat template. Use a model with a "
                "chat_template.jinja, or write one into its folder."
            )
        if "strftime_now" in self._source:
            raise DataError(f"{where}: the chat template writes today's date, so a resumed training would differ.")
        self._names = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
        self._encoder, added_tokens = _Encoder(tokenizer), tokenizer.added_tokens_decoder
        separators = [str(t) for t in added_tokens.values() if t.special and not t.lstrip and not t.rstrip]
        self._separator = [str(tokenizer.eos_token), *separators][-1]
        source = self._source.replace(images.IMAGE, "")  # it is written as the separator, with any id
        controls = sorted((str(t), i) for i, t in added_tokens.items() if str(t) in source)
        rules = json.dumps([self.digest, self._source, self._names, controls])
        self.digest = hashlib.sha256(rules.encode()).hexdigest()[:16]
        end = self._find_end()
        self._end = "".join(end)
        self.check()
        self.answer_ends = self._safe.encode_token(end[-1])

    def encode_with_loss(
        self, kinds: Sequence[int], contents: Sequence[bytes | None]
    ) -> tuple[list[list[int]], list[list[bool]]]:
        """See `TextTokens`. Answers are learned from the end of their generation prompt to their end token.

        Raises:
            DataError: the template cannot write the conversation.
            UnicodeDecodeError: a text is not UTF-8.
        """
        pairs = zip(kinds, contents, strict=True)
        texts = ["" if kind == IMAGE else (content or b"").decode("utf-8-sig") for kind, content in pairs]
        ids, masks = [list[int]() for _ in kinds], [list[bool]() for _ in kinds]
        first = next((part for part, kind in enumerate(kinds) if kind in ROLE_OF), 0)
        for token, role in zip(*self._encoder.encode_roles(self._spans(kinds, texts)), strict=True):
            part = first if role < 0 else role // 2
            ids[part].append(token)
            masks[part].append(role > 0 and role % 2 == 1)
        for part in [part for part, kind in enumerate(kinds) if kind == IMAGE]:
            del ids[part][-1], masks[part][-1]  # the separator
        return ids, masks

    def _spans(self, kinds: Sequence[int], texts: Sequence[str]) -> list[Span]:
        """The text of a conversation as spans with the roles of `_Encoder`; a separator is at the place of each
        image."""
        messages = _messages(kinds, [f"{_MARK}{part}{_MARK}" for part in range(len(kinds))])
        text = self._render(messages)
        places, parts = [*_PLACE.finditer(text)], [part for part, kind in enumerate(kinds) if kind in ROLE_OF]
        if [int(place[1] or -1) for place in places] != [-1 if kinds[part] == IMAGE else part for part in parts]:
            raise DataError(f"{self._where}: the chat template must write each text and image once. Use another one.")
        numbers = [number for number, message in enumerate(messages) if number and message["role"] == "assistant"]
        answers = [self._answer(messages, number, text) for number in numbers]
        spans, offset = list[Span](), 0
        for part, place in zip(parts, places, strict=True):
            spans += _template_spans(text, offset, place.start(), part, answers)
            content = texts[part] if place[1] else self._separator
            is_learned = any(begin <= place.start() < end for begin, end in answers)
            spans.append(Span(content, 2 * part + is_learned, controls=not place[1]))
            offset = place.end()
        spans += _template_spans(text, offset, len(text), parts[-1], answers) if parts else []
        return self._with_spaces([span for span in spans if span.text]) if self._adds_spaces else spans

    def _with_spaces(self, spans: Sequence[Span]) -> list[Span]:
        """Spans with a space between an image and a text, like those of transformers' Idefics2Processor."""
        result = list[Span]()
        for before, span in pairwise([Span("", 0), *spans]):
            is_text = span.text != self._separator and not (span.text[0].isspace() or span.text[0] == "<")
            result += [Span(" ", span.role)] if before.text == self._separator and is_text else []
            result.append(span)
        return result

    def _answer(self, messages: Sequence[Any], number: int, text: str) -> tuple[int, int]:
        """The range in `text` of message `number`, an answer, to its end token."""
        prompt = self._render(messages[:number], answering=True)
        end = messages[number]["content"][-1]["text"] + self._end
        if not (self._end and text.startswith(prompt) and end in text):
            raise DataError(
                f"{self._where}: the chat template does not start the answer with its generation prompt, "
                f"{prompt[-40:]!r}, or no control token ends it. Use one that does, and check the tokenizer's tokens."
            )
        return len(prompt), text.index(end) + len(end)

    def _find_end(self) -> list[str]:
        """Text of the template after an answer, up to the last control token before the next message, split at control
        tokens."""
        messages = _messages([kind for kind, _ in _PROBE], [_MARK + str(part) for part in range(len(_PROBE))])
        texts = [self._render(messages[:count]).partition(_MARK + "2")[2] for count in (2, 3)]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
        return self._encoder.until_control("".join(character for character, _ in same))

    def _render(self, messages: Sequence[Any], answering: bool = False) -> str:
        source: Any = self._source
        return render_template(self._where, source, messages, add_generation_prompt=answering, **self._names)[0]

    def check(self, has_system: bool = False) -> None:
        """Raises DataError if the template cannot be trained with. has_system: whether documents have SYSTEM parts."""
        kinds, texts = zip(*[(SYSTEM, _TEXT)] * has_system, *_PROBE, strict=True)
        self._spans(kinds, texts)
        text = self._render(_messages(kinds, [f"{_MARK}{part}{_MARK}" for part in range(len(kinds))]))
        expected = _PLACE.sub(lambda place: texts[int(place[1])] if place[1] else place.group(), text)
        if self._render(_messages(kinds, texts)) != expected:
            raise DataError(f"{self._where}: the chat template changes the text of messages. Use one that does not.")


def _messages(kinds: Sequence[int], texts: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a document, as transformers' processors read them."""
    items = [
        (ROLE_OF[kind], {"type": "image"} if kind == IMAGE else {"type": "text", "text": text})
        for kind, text in zip(kinds, texts, strict=True)
        if kind in ROLE_OF
    ]
    messages = groupby(items, key=lambda item: item[0])
    return [{"role": role, "content": [item for _, item in group]} for role, group in messages]


def _template_spans(text: str, begin: int, end: int, part: int, answers: Sequence[tuple[int, int]]) -> list[Span]:
    """Text of the template before a part, split at the borders of answers."""
    borders = sorted({begin, end, *(border for answer in answers for border in answer if begin < border < end)})
    return [
        Span(text[one:other], 2 * part + any(first <= one < last for first, last in answers), controls=True)
        for one, other in pairwise(borders)
    ]


def make_tokens(tokenizer: "PreTrainedTokenizerFast", style: str, is_chat: bool, where: str = "chat") -> TextTokens:
    """The tokens of a source's texts. style: see `ImagesConfig`. where: see `ChatTokens`."""
    return ChatTokens(tokenizer, style, where) if is_chat else TextTokens(tokenizer, style)


def check_system(texts: TextTokens, folders: Sequence[Path]) -> None:
    """Raises DataError if documents of these folders have system messages that the chat template cannot write."""
    lists = [manifest.load(folder) for folder in folders if (folder / manifest.NAME).is_file()]
    has_system = any(SYSTEM in index.parts["kind"] for each in lists for _, index in _indexes(each))
    if isinstance(texts, ChatTokens) and has_system:
        texts.check(has_system)


def _indexes(shard_list: Manifest) -> Iterator[tuple[Shard, TarIndex]]:
    for shard in shard_list.shards:
        yield shard, tar_index.load_file(shard_list.folder / shard.index, shard.bytes, shard.url, shard.index_digest)


def check_documents(where: str, shard_list: Manifest) -> None:
    """Raises DataError, which starts with `where`, for a document that is not a conversation."""
    for shard, index in _indexes(shard_list):
        kinds, records = index.parts["kind"].tolist(), index.documents[["first_part", "parts", "bad"]].tolist()
        for number, (first, count, bad) in enumerate(records):
            roles = [role for role, _ in groupby(ROLE_OF[k] for k in kinds[first : first + count] if k in ROLE_OF)]
            turns = roles[roles[:1] == ["system"] :]
            if bad in _BAD:
                problem = ". The first of this tar: ".join([REASONS[bad], *index.facts.get("problems", ())])
            elif bad == GOOD and (not turns or turns != ["user", "assistant"] * (len(turns) // 2)):
                problem = f"its roles are {', '.join(roles) or 'none'}; expected user and assistant in turns"
            else:
                continue
            raise DataError(
                f"{where}: document {number} of {shard.url}: {problem}. Correct or remove it, and index the tars again "
                "with python -m data_prep.interleaved.index."
            )
