"""Index files: the numbers of the rows of a split that are asked."""

from src.data import jsonl
from src.errors import ConfigError
from src.evaluation.metrics import answers
from src.experiments.config import Places
from src.systems.crossattn.data.subsets import RowsConfig


def check(places: Places, data: RowsConfig, split: str, name: str | None) -> None:
    """Refuse a split or an index file that the data set does not have, without reading it.

    Raises:
        DataError: the data set lacks it; says what there is.
        ConfigError: the numbers would refer to other rows.
    """
    folder = jsonl.corpus_folder(places, data.corpus)
    jsonl.require_file(folder, f"{split}.jsonl")
    if name is None:
        return
    jsonl.require_file(folder, name)
    options = data.model_dump()
    for field in (f"{split}_datasets", f"{split}_samples"):
        if options.get(field) is not None:
            order = ", in another order" if field == "val_samples" else ""
            raise ConfigError(
                f"inference.index_file: counts the rows of {split}.jsonl, of which data.{field} uses some{order}. "
                f"Leave one of the two out."
            )


def read(places: Places, data: RowsConfig, name: str) -> list[int]:
    """The numbers in the file `name` of the data set.

    Raises:
        DataError: the data set or the file is missing, or a line is no number; names it.
    """
    return answers.read_row_indices(jsonl.require_file(jsonl.corpus_folder(places, data.corpus), name))
