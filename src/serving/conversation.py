"""A conversation with a model that was trained on conversations, written as its experiment writes them."""

from collections.abc import Callable
from typing import Any

from src.data.conversations import templates
from src.data.conversations.dataset import ConversationConfig, with_system
from src.data.conversations.entries import Message
from src.data.conversations.rendering import Renderer
from src.errors import ConfigError
from src.models.reward.layers import RewardModel

RESET = "!reset"
"""A line that restarts the conversation."""


class Talk:
    """A conversation of a person with a model."""

    def __init__(self, model: Any, tokenizer: Any, data: ConversationConfig) -> None:
        """Raises ConfigError for a reward model, which only scores."""
        if isinstance(model, RewardModel):
            raise ConfigError("a reward model gives a conversation a number and writes nothing. Use the run that it was trained from.")
        self._model, self._tokenizer, self._system = model, tokenizer, data.writing.system
        self._renderer = Renderer(tokenizer, templates.find(data.writing.template, tokenizer))
        self._ends, never = self._renderer.answer_ends()
        self._never = never or None
        self.messages: list[Message] = []

    def streamer(self, show: Callable[[str], object] | None = None) -> Any:
        """Of transformers: gives `show` an answer piece by piece, as it comes. None: writes it to standard output."""
        from transformers import TextStreamer

        streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        if show is not None:
            streamer.on_finalized_text = lambda text, stream_end=False: show(text)  # type: ignore[method-assign]
        return streamer

    def prompt(self) -> list[int]:
        """Ids of the conversation, up to the next answer."""
        return self.prompt_ids(self.messages)

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids of `messages`, up to the next answer."""
        return self._renderer.render(with_system(messages, self._system), answering=True).ids

    def answer(self, text: str, streamer: Any = None, **options: Any) -> str:
        """Answer the next message of the user; the line `RESET` restarts the conversation and has no answer.

        streamer: of transformers, which gets tokens as they come. options: of transformers' `generate`.

        Raises:
            ConfigError: the conversation is too long for the model; the message is removed.
        """
        if text.strip() == RESET:
            self.messages.clear()
            return ""
        self.messages.append(Message("user", text))
        try:
            (ids,) = self._generate(self.prompt(), streamer, **options)
        except ConfigError as error:
            self.messages.pop()
            raise ConfigError(f"the conversation: {error} Say {RESET}, or request fewer.") from None
        self.messages.append(self._renderer.read_answer(str(self._tokenizer.decode(ids))))
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def generate(self, prompt: list[int], streamer: Any = None, **options: Any) -> list[str]:
        """Answers to the ids of a prompt: one, or `num_return_sequences`. See `answer`.

        Raises:
            ConfigError: an answer could be too long for the model.
        """
        return [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in self._generate(prompt, streamer, **options)]

    def _generate(self, prompt: list[int], streamer: Any, **options: Any) -> list[list[int]]:
        import torch

        ids = torch.tensor([prompt], device=self._model.device)
        longest = getattr(self._model.config, "max_position_embeddings", None)
        if longest and ids.shape[1] + options["max_new_tokens"] > longest:
            raise ConfigError(f"{ids.shape[1]} tokens and max_new_tokens {options['max_new_tokens']} are more than the model's {longest}.")
        with torch.no_grad():
            rows = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                eos_token_id=self._ends,
                pad_token_id=self._ends[0],
                suppress_tokens=self._never,
                streamer=streamer,
                **options,
            )
        return [row[ids.shape[1] :].tolist() for row in rows]
