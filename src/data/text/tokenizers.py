"""Load tokenizers from a folder or the local hub cache, and encode user text without control tokens."""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.data import jsonl
from src.errors import DataError
from src.files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_BATCH = 256
_CONTROL_NAME = re.compile(r"<[|\uff5c].+[|\uff5c]>")
_FALLBACK_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PROBE = "a b  C\n\t1.5 \u00c4\u6f22\U0001f600 end "


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of a fast tokenizer, as in `training.state.fingerprints`."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def file_digest(folder: Path) -> str | None:
    """`tokenizer_digest` of a folder whose tokenizer transformers does not change when it loads it, read in
    milliseconds; None if tokenizer.json is missing or damaged."""
    from tokenizers import Tokenizer

    try:
        text = Tokenizer.from_file(str(folder / "tokenizer.json")).to_str()
    except Exception:  # noqa: BLE001  tokenizers raises a bare Exception; `load` describes the fault
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def load(source: str | Path, extra: Sequence[str] = (), end_token: str | None = None) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a folder, or of a hub id in the local cache, with the control tokens `extra`. Downloads
    nothing.

    end_token: a token of its vocabulary to use as end token instead of its own.

    Raises:
        DataError: it is missing, damaged, not a fast tokenizer, or has no end token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not os.path.isdir(source) and _is_path(source):
        raise DataError(
            f"{source}: no such tokenizer folder. {jsonl.preparation_hint(Path(source)) or 'Check the path.'}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    except Exception as error:  # a damaged file gives a bare Exception, or whatever a wrong type leads to
        raise DataError(_describe_error(source, error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(
            f"{source}: {type(tokenizer).__name__} is not a fast tokenizer. "
            "Convert it to a folder with tokenizer.json first."
        )
    if end_token is not None:
        if end_token not in tokenizer.get_vocab():
            raise DataError(
                f"{source}: end token {end_token!r} is not in the vocabulary. Choose a token of this tokenizer."
            )
        tokenizer.eos_token = end_token
    _end_id(tokenizer, source)
    tokenizer.chat_template = _processor_template(source) or default_template(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": [*extra]}, replace_extra_special_tokens=False)
    return tokenizer


def default_template(tokenizer: Any) -> str | None:
    """The chat template of a tokenizer; the one named "default" of several, as of Command R and Hermes."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def is_control(token: Any) -> bool:
    """Whether an added token is a control token: by its settings, or by its name, such as DeepSeek's <｜User｜>."""
    return bool(token.special or _CONTROL_NAME.fullmatch(str(token)))


def _processor_template(source: str | Path) -> str | None:
    """The template in chat_template.json, where processors of older models have it; they prefer it to the
    tokenizer's."""
    from transformers.utils.hub import cached_file

    path = cached_file(
        str(source),
        "chat_template.json",
        local_files_only=True,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else read_json(Path(path), DataError).get("chat_template")


def _end_id(tokenizer: "PreTrainedTokenizerFast", source: str | Path) -> int:
    if not isinstance(tokenizer.eos_token_id, int):
        raise DataError(
            f"{source}: the tokenizer has no eos_token, which must end every answer and document. "
            "Add one with python -m data_prep.assistants.chat_tokenizer --end_token."
        )
    return tokenizer.eos_token_id


def names_end_token(folder: Path) -> bool:
    """Whether a tokenizer's settings name an end token, without loading it; False if they cannot be read."""
    try:
        return bool(read_json(folder / "tokenizer_config.json", DataError)["eos_token"])
    except (DataError, LookupError, TypeError):
        return False


def spells(folder: Path, tokens: Collection[str]) -> bool:
    """Whether tokenizer.json contains all `tokens`, without loading it; False if it cannot be read."""
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return all(json.dumps(token, ensure_ascii=False) in text for token in tokens)


def control_ids(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Ids of the tokenizer's control tokens except the end token."""
    return [
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if is_control(token) and index != tokenizer.eos_token_id
    ]


def token_bytes(tokenizer: "PreTrainedTokenizerFast") -> list[int] | None:
    """Bytes of UTF-8 text that each id stands for, 0 for control tokens. None if the tokens of a text do not add up to
    the text, as with word pieces, or with a blank that the tokenizer adds before a text."""
    decoder = str(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    if "ByteLevel" not in decoder and "ByteFallback" not in decoder:
        return None
    added_tokens = tokenizer.added_tokens_decoder
    vocabulary = tokenizer.get_vocab()
    sizes = [0] * (max(vocabulary.values()) + 1)  # ids can have gaps
    for text, index in vocabulary.items():
        if index in added_tokens:
            sizes[index] = 0 if is_control(added_tokens[index]) else len(text.encode())
        elif "ByteLevel" in decoder:
            sizes[index] = len(text)  # each character of the vocabulary is a byte
        else:
            sizes[index] = 1 if _FALLBACK_BYTE.fullmatch(text) else len(text.replace("\u2581", " ").encode())
    adds_up = sum(sizes[index] for index in SafeTokenizer(tokenizer).encode(_PROBE)) == len(_PROBE.encode())
    return sizes if adds_up else None


def _describe_error(source: str | Path, error: Exception) -> str:
    """Error message for a tokenizer that transformers could not load because of `error`."""
    if os.path.isdir(source) and not os.path.isfile(Path(source) / "tokenizer.json"):
        return f"{source}: no tokenizer.json in this folder."
    if (
        not os.path.isdir(source)
        and isinstance(error, OSError | ValueError)
        and not isinstance(error, json.JSONDecodeError)
    ):
        return (
            f"{source}: not in the local cache of the hub, and not a folder. "
            f"On a machine with network: hf download {source}; or give the path of a folder with tokenizer.json."
        )
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"{source}: the tokenizer cannot be read ({reason[:200]}). "
        f"{jsonl.preparation_hint(Path(source)) or 'Get it again.'}"
    )


def _is_path(source: str | Path) -> bool:
    """A hub id is "name" or "owner/name"; anything else can only be a path."""
    return isinstance(source, Path) or source.startswith((".", "/", "~")) or source.count("/") > 1


class SafeTokenizer:
    """Encodes user text: "<|assistant|>" in it is plain characters, never a control token.

    The tokenizer is copied, so that neither changes the other's settings.

    Raises:
        DataError: the tokenizer has no end token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        from tokenizers import Tokenizer

        added_tokens = tokenizer.added_tokens_decoder
        self._controls = {str(token): index for index, token in added_tokens.items() if is_control(token)}
        settings = tokenizer.backend_tokenizer.to_str()
        if any(str(token) in self._controls and not token.special for token in added_tokens.values()):
            raw = json.loads(settings)
            raw["added_tokens"] = [
                {**token, "special": token["special"] or token["content"] in self._controls}
                for token in raw["added_tokens"]
            ]
            settings = json.dumps(raw)
        self._backend = Tokenizer.from_str(settings)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True
        _split_spelled_controls(self._backend, self._controls)
        self._inner = _inner_backend(self._backend)
        self._continuing = _continuing_backend(self._backend)
        pad = tokenizer.pad_token_id
        self.eos_id = _end_id(tokenizer, tokenizer.name_or_path)
        self.pad_id = pad if isinstance(pad, int) else self.eos_id
        self.start: list[int] = start_ids(tokenizer)
        self.chat: tuple[tuple[str, ...], tuple[str, ...]] | None = _chat_pieces(
            tokenizer, [*self._controls], bool(self.start)
        )
        """Text of the chat template before and after a user message, up to the answer, with each control token as one
        piece. None if there is no template for a single message."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for backend in (self._backend, self._inner, self._continuing):
            backend.encode_special_tokens = True  # pickling loses it

    def encode(self, text: str, first: bool = True, continues: bool = False) -> list[int]:
        """Encode user text without control tokens. first: False after a control token. continues: the text follows
        other text."""
        return self._backend_for(first, continues).encode(text, add_special_tokens=False).ids if text else []

    def _backend_for(self, first: bool, continues: bool) -> "Tokenizer":
        return self._continuing if continues else self._backend if first else self._inner

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Encode many texts on all cores."""
        for first in range(0, len(texts), _BATCH):
            for encoding in self._backend.encode_batch_fast(
                list(texts[first : first + _BATCH]), add_special_tokens=False
            ):
                yield encoding.ids

    def encode_spans(
        self, text: str, first: bool = True, continues: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Like `encode`, with the half-open character span of each id. The ids of one character share its span."""
        encoding = self._backend_for(first, continues).encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @property
    def control_ids(self) -> list[int]:
        """Ids of all control tokens."""
        return [*self._controls.values()]

    def control_id(self, token: str) -> int | None:
        """Id of a control token; None if it is not in the vocabulary."""
        return self._controls.get(token)

    def encode_token(self, token: str) -> list[int]:
        """A control token as one id, or as the ids of its characters if it is not in the vocabulary."""
        index = self.control_id(token)
        return self.encode(token) if index is None else [index]


def _split_spelled_controls(backend: "Tokenizer", controls: Iterable[str]) -> None:
    """Split text that spells a control token after its first character, if the model of `backend` would encode it as
    that token.

    Unigram models with control tokens among their pieces do so, such as transformers' T5Tokenizer. Other text is split
    as before.
    """
    from tokenizers import Regex, models, pre_tokenizers

    pieces = backend.get_vocab(with_added_tokens=False)
    names = [name for name in controls if name in pieces]
    if not isinstance(
        backend.model, models.Unigram
    ):  # a unigram model also depends on the surrounding text; other models can be tested
        texts = [text for name in names for text in (name, f"a{name}b", f"a {name} b")]
        ids = {pieces[name] for name in names}
        names = (
            names
            if any(ids & set(encoding.ids) for encoding in backend.encode_batch(texts, add_special_tokens=False))
            else []
        )
    if not names:
        return
    rests: dict[str, list[str]] = {}
    for name in names:
        rests.setdefault(name[0], []).append(re.escape(name[1:]))
    pattern = "|".join(f"{re.escape(first)}(?={'|'.join(endings)})" for first, endings in rests.items())
    split = pre_tokenizers.Split(Regex(pattern), behavior="merged_with_previous")
    before = backend.pre_tokenizer
    backend.pre_tokenizer = split if before is None else pre_tokenizers.Sequence([before, split])


def _inner_backend(backend: "Tokenizer") -> "Tokenizer":
    """A tokenizer for text after a control token. Differs only for Metaspace with prepend_scheme "first", as in
    Llama."""
    return _replace_settings(backend, {'"prepend_scheme":"first"': '"prepend_scheme":"never"'})


def _continuing_backend(backend: "Tokenizer") -> "Tokenizer":
    """A tokenizer for text that continues other text: adds no leading blank."""
    settings = {f'"prepend_scheme":"{scheme}"': '"prepend_scheme":"never"' for scheme in ("first", "always")}
    settings |= {'"add_prefix_space":true': '"add_prefix_space":false', '"prepend":"\u2581"': '"prepend":""'}
    return _replace_settings(backend, settings)


def _replace_settings(backend: "Tokenizer", replacements: Mapping[str, str]) -> "Tokenizer":
    """Replace settings of the pre-tokenizer and normalizer in a copy; `backend` itself if nothing changes.
    replacements: substrings of the settings' JSON."""
    from tokenizers import Tokenizer

    copy = None
    for part in ("pre_tokenizer", "normalizer"):
        step = getattr(backend, part)
        settings = changed = step.__getstate__().decode() if step else ""
        for old, new in replacements.items():
            changed = changed.replace(old, new)
        if changed != settings:
            copy = copy or Tokenizer.from_str(backend.to_str())
            step = getattr(copy, part)
            step.__setstate__(changed.encode())
            setattr(copy, part, step)
    if copy is not None:
        copy.encode_special_tokens = True
    return copy or backend


def _chat_pieces(
    tokenizer: "PreTrainedTokenizerFast", controls: Sequence[str], has_start: bool
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """See `SafeTokenizer.chat`. has_start: whether the start token is added elsewhere."""
    if not isinstance(tokenizer.chat_template, str):
        return None
    probe = "The message of a user."
    # The date in a prompt is fixed, so that the same run reads the same prompt tomorrow.
    messages = [{"role": "user", "content": probe}]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string="01 Jan 2025"
        )
    except Exception:  # noqa: BLE001  a template can raise anything; this one refuses a single message
        return None
    before, probe, after = str(text).partition(probe)
    if not probe or ("strftime_now" in tokenizer.chat_template and "date_string" not in tokenizer.chat_template):
        return None
    if has_start and tokenizer.bos_token:
        before = before.removeprefix(str(tokenizer.bos_token))
    pattern = "|".join(map(re.escape, sorted(controls, key=len, reverse=True)))

    def pieces(text: str) -> tuple[str, ...]:
        return tuple(piece for piece in (re.split(f"({pattern})", text) if pattern else [text]) if piece)

    return pieces(before), pieces(after)


def start_ids(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Ids that the tokenizer prepends to every sequence, such as Llama's <s>; often empty."""
    ids = list(tokenizer("")["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id != tokenizer.bos_token_id:
        ids.pop()
    return ids
