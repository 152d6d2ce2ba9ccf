"""Validation rows with every document once, their questions, and both with images from other documents."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from src.data.packing.lanes import Packing, pack_epoch
from src.experiments.batches import InterleavedBatch
from src.experiments.dataset_protocols import Batch
from src.systems.interleaved.streaming.documents import Piece, Swaps
from src.systems.interleaved.streaming.tar_index import PROMPT, TEXT

if TYPE_CHECKING:
    from src.systems.interleaved.streaming.dataset import Sample, StreamedDataset


class Question(NamedTuple):
    """A prompt of a document that is followed by an answer."""

    document: int
    prompt: int
    """Index of the prompt, or of the end of a conversation's first message, among the elements of the first piece."""
    last: int
    """Index of the last text of the answer."""


class InOrder:
    """An `Arrangement` of documents in a given order."""

    def __init__(self, documents: Sequence[int]) -> None:
        self.documents, self.count = documents, len(documents)

    def epoch(self, lane: int, lanes: int, number: int) -> int:
        """See `packing.lanes.Arrangement`."""
        return (number * lanes + lane) // self.count

    def document(self, lane: int, lanes: int, number: int, reshuffles: Sequence[Sequence[int]] = ()) -> tuple[int, int]:
        """See `packing.lanes.Arrangement`."""
        assert not reshuffles, "an evaluation has no reshuffles"
        return self.epoch(lane, lanes, number), self.documents[(number * lanes + lane) % self.count]


class ValidationRows:
    """Validation rows by index; `parts` has the rows of each source."""

    def __init__(self, data: "StreamedDataset", names: Sequence[str], shuffled: bool = False) -> None:
        """names: sources to include. shuffled: replace each image by one of the same size from another document."""
        self.data, self.names, self.shuffled = data, names, shuffled
        self.fingerprint = data.fingerprint
        of_sources = zip(data.source_names, data.documents, strict=True)
        contents = [documents.content for name, documents in of_sources if name in names]
        self.content = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
        max_documents = data.config.val_documents
        self._ranges = {
            name: range(data.first(source), data.first(source) + min(len(documents), max_documents or len(documents)))
            for source, (name, documents) in enumerate(zip(data.source_names, data.documents, strict=True))
            if name in names
        }
        self._swaps = (
            {name: self._shuffle_images(documents) for name, documents in self._ranges.items()} if shuffled else {}
        )
        self._rows = [(name, row) for name, documents in self._ranges.items() for row in self._pack(documents)]
        self._questions = [
            question
            for documents in self._ranges.values()
            for document in documents
            if (question := self._ask(document))
        ]

    @cached_property
    def parts(self) -> "Mapping[str, ValidationRows]":
        """The rows of each source, by name. If shuffled, only sources with swapped images."""
        names = [name for name in self.names if self._swaps.get(name) or not self.shuffled]
        return (
            {name: ValidationRows(self.data, [name], self.shuffled) for name in names}
            if len(self.names) > 1
            else {"": self}
        )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def sample(self, epoch: int, index: int) -> "Sample":
        """Row `index`, the same in each epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        name, row = self._rows[index]
        return self.data.sample(*row, swaps=self._swaps.get(name))

    def collate(self, samples: "Sequence[Sample]") -> InterleavedBatch:
        """See `StreamedDataset`. All tokens have weight 1."""
        batch = self.data.collate(samples)
        batch.pop("loss_weights", None)
        return batch

    @property
    def reads_contexts(self) -> bool:
        """Whether there are images to swap. Images are the contexts of a document's questions."""
        return any(self._control._swaps.values())

    @cached_property
    def _control(self) -> "ValidationRows":
        return ValidationRows(self.data, self.names, shuffled=True)

    @property
    def num_questions(self) -> int:
        """Number of documents with a prompt and an answer in their first piece."""
        return len(self._questions)

    def row(self, index: int) -> dict[str, Any]:
        """Question `index` and its answer."""
        question = self._questions[index]
        source, local_number = self.data.locate(question.document)
        documents, elements = self.data.documents[source], self.data.pieces(question.document)[0].elements
        first = 0 if documents.texts.is_chat else question.prompt
        texts, answers = (
            [documents.text(local_number, element.part) for element in some if element.kind in (PROMPT, TEXT)]
            for some in (elements[first : question.prompt + 1], elements[question.prompt + 1 : question.last + 1])
        )
        shard, number = documents.locate(local_number)
        return {
            "question": " ".join(texts),
            "answer": " ".join(answers),
            "context": f"document {number} of {documents.manifest.shards[shard].url}",
            "dataset": self.data.source_names[source],
        }

    def source(self, index: int) -> str:
        """Source of a question; scores are grouped by it."""
        return self.data.source_names[self.data.locate(self._questions[index].document)[0]]

    def prompt(self, index: int) -> "Sample":
        """The document of a question, up to the end of the prompt; with the generation prompt of a chat template."""
        question = self._questions[index]
        first, is_chat = self.data.pieces(question.document)[0], self._is_chat(question.document)
        elements = first.elements[: question.prompt + 1 + is_chat]
        tokens = sum(element.tokens for element in elements)
        piece = Piece(elements, True, False, tokens, first.frames)
        source, _ = self.data.locate(question.document)
        row = self.data.read_piece(question.document, piece, self._swaps.get(self.data.source_names[source]))
        return row.until_answer() if is_chat else row

    @property
    def answer_ends(self) -> list[int]:
        """See `QuestionDataset`: of chat templates."""
        ends = [documents.texts.answer_ends for documents in self.data.documents]
        return sorted({token for tokens in ends for token in tokens})

    def collate_prompts(self, samples: "Sequence[Sample]") -> Batch:
        """Batch of prompts, padded on the left for `generate`; frames as (1, N, 3, E, E), as transformers expects.

        A batch without images has one dummy frame: with sharded weights all processes must run the encoder, or they
        hang.
        """
        import numpy as np
        import torch

        from src.data import collate

        batch = collate.pad_tokens(
            [row.input_ids for row in samples], [row.loss_mask for row in samples], 0, pad_left=True
        )
        side = self.data.config.images.frame_size
        frames = [frames for row in samples for frames in row.frames] or [np.ones((1, 3, side, side), dtype=np.float32)]
        return {**batch, "pixel_values": torch.from_numpy(np.concatenate(frames))[None]}

    def with_shuffled_contexts(self) -> "ValidationRows":
        """Control: the same documents with images of the same size from different documents."""
        return self._control

    def _pack(self, documents: Sequence[int]) -> list[list[int]]:
        data = self.data
        room = (data.config.sequence_tokens, data.config.max_frames)
        return pack_epoch(Packing(InOrder(documents), data.sizes, room, data.config.open_rows, "data"))

    def _ask(self, document: int) -> Question | None:
        """The first prompt of a document that is followed by an answer; later prompts come after answers. The prompt
        of a conversation is the end of its first message, which can be an image."""
        pieces = self.data.pieces(document)
        kinds = [element.kind for element in pieces[0].elements] if pieces else []
        for place, kind in enumerate(kinds):
            if (kind == PROMPT or self._is_chat(document)) and kinds[place + 1 : place + 2] == [TEXT]:
                last = place + 1
                while kinds[last + 1 : last + 2] == [TEXT]:
                    last += 1
                return Question(document, place, last)
        return None

    def _is_chat(self, document: int) -> bool:
        return self.data.documents[self.data.locate(document)[0]].texts.is_chat

    def _shuffle_images(self, documents: Sequence[int]) -> Swaps:
        """Replace each image by the next one with the same grid from another document."""
        groups: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for document in documents:
            source, local_number = self.data.locate(document)
            for element in self.data.documents[source].elements(local_number):
                if element.grid is not None:
                    groups[element.grid].append((local_number, element.part))
        swaps = {}
        for images in groups.values():
            max_images = max(Counter(local_number for local_number, _ in images).values())
            for place, image in enumerate(images):
                others = (images[(place + max_images + more) % len(images)] for more in range(len(images)))
                if other := next((other for other in others if other[0] != image[0]), None):
                    swaps[image] = other
        return swaps
