"""Text exchange between people and a model. `Writer` is the interface; `Continuation` continues texts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from src.data.text.tokenizers import control_ids
from src.errors import ConfigError

RESET = "/reset"
"""A message that restarts the conversation, like "!reset"."""


def is_reset(text: str) -> bool:
    """Whether a message restarts the conversation."""
    return text.strip() in (RESET, "!reset")


class ConversationTooLong(ConfigError):
    """A conversation that does not fit the model. Restarting it can help."""


class Writer(ABC):
    """A model that answers or continues the texts of people."""

    verb: str
    """Description of the model's action for people, such as "answers"."""
    remark = ""
    """Why the last text ended before an end token (`describe_truncation`); else empty."""

    def set_metadata(self, texts: Iterable[str]) -> None:
        """Set the metadata of the generated text, from `KEY=VALUE` texts.

        Raises:
            ConfigError: a text is malformed, or the model was not trained with this metadata.
        """
        if list(texts):
            raise ConfigError("--metadata: the model was not trained on documents with metadata. Leave it out.")

    @abstractmethod
    def say(self, text: str, show: Callable[[str], object], **options: Any) -> None:
        """Generate text after `text`, pass its pieces to `show`, and add both to the conversation. options: for
        transformers' `generate`.

        Raises:
            UserError: the model cannot read the text, or the conversation with it.
        """

    @abstractmethod
    def ask(self, context: str, question: str, **options: Any) -> str:
        """Answer a question about a context, outside the conversation. options, errors: see `say`."""

    @abstractmethod
    def reset(self) -> None:
        """Restart the conversation."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The conversation as JSON rows for `prepare_conversations`; empty at the start."""


class Continuation(Writer):
    """A model that continues texts."""

    verb = "continues each text"

    def __init__(self, model: Any, tokenizer: Any, data: Any = None) -> None:
        """data: the data config of the model's experiment, if known."""
        self._model, self._tokenizer = model, tokenizer
        self._texts: list[str] = []
        self._is_seq2seq = bool(getattr(model.config, "is_encoder_decoder", False))

    def say(self, text: str, show: Callable[[str], object], **options: Any) -> None:
        """See `Writer`. The shown text includes `text`, as the continuation can start within a word."""
        self._texts.append(text + self.write(text, **options))
        show(self._texts[-1])

    def ask(self, context: str, question: str, **options: Any) -> str:
        """See `Writer`. The answer is the rest of a line."""
        text = self.write(f"{context}\n\nQuestion: {question}\nAnswer:", **options)
        answer, line_end, _ = text.partition("\n")
        self.remark = "" if line_end else self.remark
        return answer

    def reset(self) -> None:
        """Forget the texts."""
        self._texts.clear()

    def rows(self) -> list[dict[str, Any]]:
        """The texts with their continuations."""
        return [{"text": text} for text in self._texts]

    def prompt(self, text: str) -> list[int]:
        """Token ids of the text."""
        return list(self._tokenizer(text)["input_ids"]) or [self._tokenizer.eos_token_id]

    def write(self, text: str, streamer: Any = None, **options: Any) -> str:
        """Generate the continuation of a text. options: for transformers' `generate`.

        Raises:
            ConfigError: the text and its continuation can exceed the model's context.
        """
        import torch

        ids = torch.tensor([self.prompt(text)], device=self._model.device)
        prompt_tokens = 0 if self._is_seq2seq else ids.shape[1]
        limit = options["max_new_tokens"] = fit_new_tokens(self._model, prompt_tokens, options["max_new_tokens"])
        end = self._tokenizer.eos_token_id
        with torch.no_grad():
            rows = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                eos_token_id=end,
                pad_token_id=end if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id,
                suppress_tokens=control_ids(self._tokenizer) or None,
                streamer=streamer,
                **options,
            )
        new = rows[0, 1 if self._is_seq2seq else prompt_tokens :].tolist()  # 1: the start token
        self.remark = describe_truncation(new, limit, [end], prompt_tokens + limit == positions(self._model))
        if self._is_seq2seq:
            return self._tokenizer.decode(rows[0], skip_special_tokens=True)
        # Decode together with the prompt, as a tokenizer can drop a leading blank.
        before = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        start, complete = (self._tokenizer.decode(part, skip_special_tokens=True) for part in (before, [*before, *new]))
        return complete[len(start) :]


def stream_to(tokenizer: Any, show: Callable[[str], object]) -> Any:
    """A transformers streamer that passes each piece of an answer to `show`."""
    from transformers import TextStreamer

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.on_finalized_text = lambda text, stream_end=False: show(text)  # type: ignore[method-assign]
    return streamer


def positions(model: Any) -> int | None:
    """Maximum tokens of a text that the model can read and write; None if its config has no maximum."""
    return getattr(model.config, "max_position_embeddings", None)


def fit_new_tokens(model: Any, tokens: int, new_tokens: int | None) -> int:
    """Maximum tokens to generate after a prompt of `tokens`: `new_tokens`, or by default 100, or fewer if the model has
    no more positions.

    Raises:
        ConfigError: `tokens` and `new_tokens` exceed the context of the model, or the prompt fills it.
    """
    longest = positions(model)
    if new_tokens is None:
        new_tokens = max(1, min(100, longest - tokens)) if longest else 100
    if longest and tokens + new_tokens > longest:
        raise ConfigError(
            f"{tokens} tokens and --max_new_tokens {new_tokens} exceed the {longest} positions of the model. "
            "Write less, or lower --max_new_tokens."
        )
    return new_tokens


def describe_truncation(new: Sequence[int], limit: int, ends: Container[int], is_full: bool = False) -> str:
    """A line for people if the generated ids `new` have `limit` tokens and no end token; else an empty text.
    is_full: whether the model has no more positions."""
    if len(new) < limit or new[-1] in ends:
        return ""
    if is_full:
        return f"(truncated after {limit} tokens: the model has no more positions)"
    return f"(truncated after {limit} tokens: raise --max_new_tokens for more)"
