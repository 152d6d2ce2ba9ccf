"""A conversation with a model, rendered by the template of its experiment or its tokenizer."""

from collections.abc import Callable
from typing import Any

from src.errors import ConfigError, DataError
from src.serving.writer import (
    ConversationTooLong,
    Writer,
    describe_truncation,
    fit_new_tokens,
    is_reset,
    positions,
    stream_to,
)
from src.systems.assistants.conversations import templates
from src.systems.assistants.conversations.dataset import ConversationConfig, with_system
from src.systems.assistants.conversations.entries import Message
from src.systems.assistants.conversations.rendering import Renderer
from src.systems.assistants.model.layers import RewardModel


class Talk(Writer):
    """A conversation of a person with a model."""

    verb = "answers"

    def __init__(self, model: Any, tokenizer: Any, data: ConversationConfig | None = None) -> None:
        """data: the config of the model's experiment, for its template; None for the tokenizer's chat template.

        Raises:
            ConfigError: the model is a reward model, which only scores.
        """
        if isinstance(model, RewardModel):
            raise ConfigError("a reward model cannot generate text. Use the run of its base model.")
        self._model, self._tokenizer, self._system = model, tokenizer, data.writing.system if data else None
        self._renderer: Renderer | None = _find_renderer(tokenizer, data)
        ends, never = self._renderer.answer_ends() if self._renderer else ([tokenizer.eos_token_id], [])
        if data is None:  # like transformers
            configured_ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
            ends, never = [*ends, *(configured_ends if isinstance(configured_ends, list) else [configured_ends])], []
        self._ends, self._never = [*dict.fromkeys(end for end in ends if end is not None)], never or None
        self.messages: list[Message] = []

    def streamer(self, show: Callable[[str], object]) -> Any:
        """See `stream_to`."""
        return stream_to(self._tokenizer, show)

    def say(self, text: str, show: Callable[[str], object], **options: Any) -> None:
        """See `Writer`."""
        self.answer(text, self.streamer(show), **options)

    def ask(self, context: str, question: str, **options: Any) -> str:
        """See `Writer`."""
        return self.generate(self.prompt_ids([Message("user", f"{context}\n\n{question}")]), **options)[0]

    def reset(self) -> None:
        """Restart the conversation."""
        self.messages.clear()

    def rows(self) -> list[dict[str, Any]]:
        """The messages, as one row."""
        return [{"messages": [message.raw for message in self.messages]}] if self.messages else []

    def prompt(self) -> list[int]:
        """Ids of the conversation, up to the next answer."""
        return self.prompt_ids(self.messages)

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids of `messages`, up to the next answer.

        Raises:
            DataError: the template rejects the messages.
        """
        messages = list(with_system(messages, self._system))
        if self._renderer:
            return self._renderer.render(messages, answering=True).ids
        try:
            ids = self._tokenizer.apply_chat_template(
                [message.raw for message in messages], add_generation_prompt=True, return_dict=True
            )
        except Exception as error:  # noqa: BLE001  a template can raise anything
            raise DataError(
                f"chat template: rejects the conversation: {str(error).splitlines()[0].rstrip('.')}. "
                "Change its messages, or use another model."
            ) from None
        return list(ids["input_ids"])

    def answer(self, text: str, streamer: Any = None, **options: Any) -> str:
        """Answer the user's next message. "/reset" restarts the conversation and returns "".

        streamer: transformers' streamer, which gets each token. options: for transformers' `generate`.

        Raises:
            ConversationTooLong: it is too long for the model. The message is removed.
        """
        if is_reset(text):
            self.messages.clear()
            self.remark = ""
            return ""
        self.messages.append(Message("user", text))
        try:
            (ids,) = self._generate(self.prompt(), streamer, **options)
        except ConfigError as error:
            self.messages.pop()
            raise ConversationTooLong(f"the conversation: {error}") from None
        except BaseException:
            self.messages.pop()
            raise
        answer = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        self.messages.append(
            self._renderer.read_answer(str(self._tokenizer.decode(ids)))
            if self._renderer
            else Message("assistant", answer)
        )
        return answer

    def generate(self, prompt: list[int], streamer: Any = None, **options: Any) -> list[str]:
        """Answers to a prompt, given as ids: one, or `num_return_sequences`. See `answer`.

        Raises:
            ConfigError: an answer could be too long for the model.
        """
        return [
            self._tokenizer.decode(ids, skip_special_tokens=True) for ids in self._generate(prompt, streamer, **options)
        ]

    def _generate(self, prompt: list[int], streamer: Any, **options: Any) -> list[list[int]]:
        import torch

        ids = torch.tensor([prompt], device=self._model.device)
        limit = options["max_new_tokens"] = fit_new_tokens(self._model, ids.shape[1], options["max_new_tokens"])
        with torch.no_grad():
            rows = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                eos_token_id=self._ends or None,
                pad_token_id=self._ends[0] if self._ends else None,
                suppress_tokens=self._never,
                streamer=streamer,
                **options,
            )
        answers = [row[ids.shape[1] :].tolist() for row in rows]
        self.remark = describe_truncation(answers[0], limit, self._ends, ids.shape[1] + limit == positions(self._model))
        return answers


def _find_renderer(tokenizer: Any, data: ConversationConfig | None) -> Renderer | None:
    """The renderer; None for a chat template that only transformers can render."""
    if data:
        return Renderer(tokenizer, templates.find(data.writing.template, tokenizer, data.writing.system))
    try:
        template = templates.find("tokenizer", tokenizer)
        renderer = Renderer(tokenizer, template)
        renderer.render(
            [*template.opening, Message("user", "?"), Message("assistant", "?"), Message("user", "?")], answering=True
        )
        renderer.answer_ends()
    except (DataError, AssertionError):
        return None
    return renderer
