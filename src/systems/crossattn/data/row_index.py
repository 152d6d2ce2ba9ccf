"""The rows of a split that inference uses, and index files with their numbers."""

from src.data import jsonl, row_counts
from src.errors import ConfigError
from src.evaluation.config import Inference
from src.evaluation.metrics import answers
from src.experiments.config import Places
from src.support.call_once import call_once
from src.systems.crossattn.data.subsets import RowsConfig, require_sources


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


def check_inference(places: Places, data: RowsConfig, inference: Inference) -> None:
    """`check`, and require that the split has the rows and sources of `inference`.

    Raises:
        UserError: see `check` and `Inference.select`.
    """
    split, sources = inference.split, inference.datasets and tuple(inference.datasets)
    check(places, data, split, inference.index_file)
    path = places.data / data.corpus / f"{split}.jsonl"
    if sources or split not in jsonl.SPLITS:  # `data.check` has read the others
        require_sources(data, places, split, "inference.datasets", sources)
    requested = inference.rows or 1
    if inference.index_file:
        numbers = read(places, data, inference.index_file)
        lines = row_counts.count_lines(path, max(numbers, default=0) + 1)
        place = f"inference.index_file: {inference.index_file}"
        available = len(answers.select_rows(lambda _: "", lines, numbers, None, place))
    else:
        available = call_once(data.count_rows, places, split, requested, sources)
        available = min(available, (data.val_samples if split == "val" else None) or available)
    row_counts.require("inference.rows" if inference.rows else "inference", requested, available)


def read(places: Places, data: RowsConfig, name: str) -> list[int]:
    """The numbers in the file `name` of the data set.

    Raises:
        DataError: the data set or the file is missing, or a line is not a number.
    """
    return answers.read_row_indices(jsonl.require_file(jsonl.corpus_folder(places, data.corpus), name))
