"""Index files: numbers of the rows of a split that inference uses."""

from src.data import jsonl
from src.errors import ConfigError
from src.evaluation.metrics import answers
from src.experiments.config import Places
from src.systems.crossattn.data.subsets import RowsConfig


def check(places: Places, data: RowsConfig, split: str, name: str | None) -> None:
    """Require that the data set has the split and the index file, without reading them.

    Raises:
        DataError: the split or the index file is missing.
        ConfigError: the data set uses only some rows of the split, so the numbers would refer to other rows.
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
                f"inference.index_file: refers to all rows of {split}.jsonl, but data.{field} selects some{order}. "
                f"Remove one of the two."
            )


def read(places: Places, data: RowsConfig, name: str) -> list[int]:
    """The numbers in the file `name` of the data set.

    Raises:
        DataError: the data set or the file is missing, or a line is not a number.
    """
    return answers.read_row_indices(jsonl.require_file(jsonl.corpus_folder(places, data.corpus), name))
