"""Conversations with ranked replies: a sample has one row per reply."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from pydantic import Field

from src.errors import DataError
from src.experiments.batches import RankedBatch
from src.experiments.config import Places
from src.experiments.kinds import REWARD
from src.systems.assistants.conversations.choices import draws
from src.systems.assistants.conversations.dataset import ConversationConfig, ConversationSamples, with_system
from src.systems.assistants.conversations.entries import Message, Reply
from src.systems.assistants.conversations.rendering import LEARNED_ROLES, Rendered, Renderer, Role
from src.systems.assistants.conversations.rows import RANKED_ROW, SCORED_ROW

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)


class RepliesConfig(ConversationConfig):
    """Source of replies to conversations; the base of `ranked_replies` and `labeled_replies`."""

    min_prompt_tokens: int = Field(default=256, ge=0)
    """If conversation and reply are too long, truncate the conversation from the left, but to no fewer tokens than
    this; then truncate the reply. Limited to half a sample."""

    @property
    def reader(self) -> str:
        return REWARD


class Config(RepliesConfig):
    """Source of ranked replies, and the number of replies per conversation."""

    kinds: ClassVar[Sequence[str]] = (RANKED_ROW, SCORED_ROW)

    max_replies: int = Field(default=5, gt=1)
    """Maximum replies per conversation: the best, the worst, and a random selection between them in each epoch."""
    shuffled_ranks: bool = False
    """Whether to shuffle the ranks of each conversation's replies in training: a control."""

    def check_scores(self, places: Places) -> None:
        for split in ("train", "val"):
            rows = self.read(places, split)
            if without := rows.numbers_of(RANKED_ROW):
                raise DataError(
                    f'{rows.location(without[0])}: replies: missing "score" ({len(without)} of {len(rows)} rows). '
                    "Add one to each reply."
                )

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "RankedReplies":
        return RankedReplies(self, places, tokenizer, split, seed)


class RepliesSample(TypedDict):
    """Conversations, each with a reply."""

    input_ids: list[list[int]]
    loss_mask: list[list[bool]]
    """True on the tokens of the reply."""
    ranks: list[int]
    """Smaller is better."""


class Sample(RepliesSample):
    """One conversation with each of its replies."""

    scores: list[float | None]
    """Scores from the data; None for a reply without one."""


class Replies(ConversationSamples):
    """Base of data sets with several replies per sample, one row each."""

    def length(self, epoch: int, index: int) -> int:
        """Tokens of the longest row of sample `index` of an epoch."""
        return max(map(len, self.sample(epoch, index)["input_ids"]))

    def collate(self, samples: Sequence[Any]) -> RankedBatch:
        """Stack the rows of all samples, padded on the right. Padding is masked, so its id does not matter."""
        import torch

        from src.data import collate

        ids, masks = ([row for sample in samples for row in sample[name]] for name in ("input_ids", "loss_mask"))
        return {
            **collate.pad_tokens(ids, masks, pad_id=self.renderer.safe.pad_id),
            "ranks": torch.tensor([rank for sample in samples for rank in sample["ranks"]]),
            "sample_of_row": torch.tensor([number for number, sample in enumerate(samples) for _ in sample["ranks"]]),
        }


class RankedReplies(Replies):
    """Conversations with replies of different ranks. Other rows are skipped."""

    collation = "ranked"
    config: Config

    def _select(self) -> Sequence[int]:
        rows, name = self._rows, self._name
        row_indices = rows.numbers_of(RANKED_ROW, SCORED_ROW)
        if not row_indices:
            raise DataError(f"{name}: no conversation has replies of different ranks. Add some.")
        if len(row_indices) < len(rows):
            counts = len(rows) - len(row_indices), len(rows)
            log.info("%s: %d of %d rows have no replies of different ranks and are skipped.", name, *counts)
        return row_indices

    def sample(self, epoch: int, index: int) -> Sample:
        """Conversation `index` of an epoch, with its best reply first."""
        rendered, ranks, scores = self._render(epoch, index)
        masks = [each.loss_mask for each in rendered]
        return {"input_ids": [each.ids for each in rendered], "loss_mask": masks, "ranks": ranks, "scores": scores}

    def render(self, epoch: int, index: int) -> list[Rendered]:
        """Conversation `index` of an epoch with each of its replies, and their roles."""
        return self._render(epoch, index)[0]

    def _render(self, epoch: int, index: int) -> tuple[list[Rendered], list[int], list[float | None]]:
        """The conversation with each reply, the ranks and the scores. Replies that truncation makes equal are tied."""
        row = self._content(index)
        entry = self._rows.entry(row)
        key = None if self._seed is None else (self._seed, epoch, index)
        replies, labels = self._choose(entry.replies, epoch, index)
        with self._rows.add_location(row):
            rendered = [
                render_reply(self.config, self.renderer, entry.messages, reply.message, key, place)
                for place, reply in enumerate(replies)
            ]
        first = dict[tuple[int, ...], int]()
        ranks = [first.setdefault(tuple(each.ids), rank) for each, (rank, _) in zip(rendered, labels, strict=True)]
        return rendered, ranks, [score for _, score in labels]

    def _choose(
        self, replies: Sequence[Reply], epoch: int, index: int
    ) -> tuple[list[Reply], list[tuple[int, float | None]]]:
        """Select the replies to read, best first; returns them with the rank and score of each."""
        ranked_replies = sorted(replies, key=lambda reply: reply.rank)  # stable: tied ones stay as in the row
        most = self.config.max_replies
        if len(ranked_replies) > most:
            places = range(1, len(ranked_replies) - 1)
            key = (0,) if self._seed is None else (self._seed, epoch)
            between = sorted(draws("replies", *key, index).sample(places, most - 2))
            ranked_replies = [ranked_replies[place] for place in (0, *between, len(ranked_replies) - 1)]
        labels = [(reply.rank, reply.score) for reply in ranked_replies]
        if self.config.shuffled_ranks and self._seed is not None:
            draws("ranks", self._seed, index).shuffle(labels)
        return ranked_replies, labels

    def collate(self, samples: Sequence[Sample]) -> RankedBatch:
        import torch

        scores = [score for sample in samples for score in sample["scores"]]
        batch = super().collate(samples)
        if None not in scores:
            batch["scores"] = torch.tensor(scores, dtype=torch.float32)
        return batch


def render_reply(
    config: RepliesConfig,
    renderer: Renderer,
    messages: Sequence[Message],
    reply: Message,
    key: tuple[int, int, int] | None = None,
    place: int = 0,
) -> Rendered:
    """The end of a conversation with a reply, up to `sequence_tokens`. Only the reply is learned.

    key: (seed, epoch, index) for dropping tags; None writes all tags. place: index of the reply in its conversation.

    Both are tokenised together, so no start token precedes the reply (B24). A prompt shorter than `min_prompt_tokens`
    leaves the rest of the sample to the reply (B5), and the sample is never too long (B6).
    """
    messages = with_system(messages, config.writing.system)
    tags, texts = config.writing.tags, list[str]()
    if tags:
        rngs = [None if key is None else draws("tags", *key, *more) for more in ((), (place,))]
        texts = [*tags.write_all(messages, rngs[0]), tags.write(reply, rngs[1])]
    rendered, most = renderer.render([*messages, reply], texts), config.sequence_tokens
    answer = rendered.last_answer()
    prompt, end = answer.start, len(rendered.ids)
    room = max(most - (end - prompt), min(config.min_prompt_tokens, most // 2), 1)  # prompt tokens
    begin = max(0, prompt - room)
    sample = rendered.part(begin, begin + most)
    before = prompt - begin
    return Rendered(
        sample.ids,
        [Role.TEMPLATE if i < before and role in LEARNED_ROLES else role for i, role in enumerate(sample.roles)],
    )
