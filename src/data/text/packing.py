"""Documents joined and cut into rows of one length: a document that is longer than a row goes on in the next."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from src.data.text.documents import Documents


class Packed:
    """Rows of exactly `length` ids of all documents in their order, each ended by the end token; what is left of the last is dropped.

    Nothing is copied but the row that is asked for.
    """

    def __init__(self, documents: "Documents", eos_id: int, length: int) -> None:
        """Raises ValueError where the documents end with another token than `eos_id`."""
        if documents.eos_id != eos_id:
            raise ValueError(f"eos_id: the documents end with token {documents.eos_id}, got {eos_id}.")
        self.documents = documents
        self.length = length
        self._count = documents.num_tokens // length

    def __len__(self) -> int:
        return self._count

    def row(self, index: int) -> "np.ndarray":
        """Row `index`: (length,) int32, which the caller may change.

        Raises:
            IndexError: there are fewer.
        """
        if not 0 <= index < self._count:
            raise IndexError(f"row {index} of {self._count}")
        return self.documents.slice_tokens(index * self.length, (index + 1) * self.length)
