"""Encode text whose parts have roles: ids with a role for each, where only a template writes control tokens.

The text between two control tokens is tokenised in one piece, as `apply_chat_template` does, unless a token would span
a generation prompt and its answer. So the ids of a prompt are a prefix of the ids of its conversation.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from src.data.text.tokenizers import SafeTokenizer, is_control
from src.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""White space that control tokens strip: Unicode's White_Space. Python's `strip` also removes U+001C to U+001F."""


class Span(NamedTuple):
    """Text of one role."""

    text: str
    role: int
    controls: bool = False
    """Whether control tokens spelled out in the text become control tokens."""


def render_template(where: str, source: str, messages: Sequence[Any], **settings: Any) -> tuple[str, Any]:
    """Render messages with a Jinja template, as `apply_chat_template` does. settings: of `render_jinja_template`, and
    variables of the template. Returns the text and, with return_assistant_tokens_mask, its ranges of answers.

    Raises:
        DataError: the template fails; starts with `where`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    try:
        texts, regions = render(conversations=[[*messages]], chat_template=source, **settings)
    except Exception as error:  # noqa: BLE001  a template can raise anything, such as ZeroDivisionError
        roles, reason = " ".join(message["role"] for message in messages), " ".join(str(error).split())[:200]
        advice = "Change the messages, or use another template."
        raise DataError(f"{where}: the template rejects {roles} ({reason}). {advice}") from None
    return texts[0], regions[0] if regions else []


class SpanEncoder:
    """Encodes spans with one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self.safe = SafeTokenizer(tokenizer)
        tokens = [token for token in tokenizer.added_tokens_decoder.values() if is_control(token)]
        names = sorted((str(token) for token in tokens), key=lambda name: (-len(name), name))
        self._strip_behind = {str(token) for token in tokens if token.rstrip}
        self._strip_before = {str(token) for token in tokens if token.lstrip}
        self._controls = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    def is_answer(self, role: int) -> bool:
        """Whether text of this role is an answer, which follows a generation prompt."""
        raise NotImplementedError

    def encode_roles(self, spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        """Ids of spans, after the tokenizer's start tokens, and the role of each; -1 for start tokens that no span has.
        A token that spans two roles gets the later role."""
        rendered = list[int](), list[int]()
        start = self.safe.start
        text, ends = "", list[tuple[int, int]]()
        for span in self._split(spans):
            if span.controls:
                self._add_text(rendered, text, ends)
                text, ends = "", []
                control = self.safe.control_id(span.text)
                assert control is not None, "split at control tokens"
                rendered[0].append(control)
                rendered[1].append(span.role)
            elif span.text:
                text += span.text
                ends.append((len(text), span.role))
        self._add_text(rendered, text, ends)
        if start and rendered[0][: len(start)] != start:
            return [*start, *rendered[0]], [-1] * len(start) + rendered[1]
        return rendered

    def _split(self, spans: Sequence[Span]) -> list[Span]:
        """Split spans so that each control token is one span, without the white space that control tokens strip."""
        split_spans = list[Span]()
        for span in spans:
            pieces = self._controls.split(span.text) if span.controls else [span.text]
            split_spans += [Span(piece, span.role, place % 2 == 1) for place, piece in enumerate(pieces)]
        return self._strip(split_spans)

    def _strip(self, spans: list[Span]) -> list[Span]:
        """Remove white space next to control tokens that strip it, like Phi's."""
        for names, step, strip in ((self._strip_behind, 1, str.lstrip), (self._strip_before, -1, str.rstrip)):
            stripping = False
            for place in range(len(spans))[::step] if names else ():
                span = spans[place]
                if span.controls:
                    stripping = span.text in names
                elif stripping:
                    spans[place] = span._replace(text=strip(span.text, _BLANKS))
                    stripping = not spans[place].text
        return spans

    def _add_text(
        self,
        rendered: tuple[list[int], list[int]],
        text: str,
        ends: Sequence[tuple[int, int]],
        continues: bool = False,
    ) -> None:
        """Append the ids of text without control tokens, and their roles. ends: end and role of each part.
        continues: the text continues the last token."""
        all_ids, all_roles = rendered
        begins = not all_ids
        if len(ends) <= 1:  # usually control tokens separate the roles
            ids = self.safe.encode(text, begins, continues)
            all_ids += ids
            all_roles += [role for _, role in ends] * len(ids)
            return
        ids, offsets = self.safe.encode_spans(text, begins, continues)
        for number, (end, role) in enumerate(ends[:-1]):
            if self.is_answer(ends[number + 1][1]) and not self.is_answer(role):
                prompt = self.safe.encode(text[:end], begins, continues)
                if ids[: len(prompt)] != prompt:  # a token would span the generation prompt and the answer
                    self._add_text(rendered, text[:end], ends[: number + 1], continues)
                    self._add_text(
                        rendered, text[end:], [(after - end, role) for after, role in ends[number + 1 :]], True
                    )
                    return
        number = 0
        for token, (_, end) in zip(ids, offsets, strict=True):
            while number < len(ends) - 1 and end > ends[number][0]:
                number += 1
            all_ids.append(token)
            all_roles.append(ends[number][1])
