"""Prepare Super-Natural-Instructions as one task of text: `python -m data_prep.t5.natural_instructions RELEASE`.

RELEASE is a checkout of allenai/natural-instructions, with splits/default and tasks. One folder is made below
--data_path: train.jsonl from the training tasks and val.jsonl from the test tasks, of which the first 100 instances are
the benchmark. Rows have the format of Tk-Instruct: a definition, the examples that fit, and the instance (Wang et al.
2022, arXiv 2204.07705). Two runs give the same bytes.
"""

import argparse
import json
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from data_prep import command
from src.data.jsonl import check_text, check_type
from src.errors import DataError
from src.files import read_json
from src.support.command_line import require_at_least

COMMAND = "python -m data_prep.t5.natural_instructions"
BENCHMARK = 100
"""Number of first instances of a test task that are the benchmark. They are balanced by label."""
SPLITS = {"train": "train_tasks.txt", "val": "test_tasks.txt"}


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("release", type=Path, help="folder with splits/ and tasks/")
    add("--name", default="sni", help="the folder that is made (default: %(default)s)")
    add("--split", default="default", help="folder below splits/ with the lists of tasks (default: %(default)s)")
    add(
        "--instances",
        type=int,
        default=100,
        help="most of a task, drawn; of a test task of its first 100 (default: %(default)s)",
    )
    add("--positive_examples", type=int, default=2, help="in an input, as far as they fit (default: %(default)s)")
    add(
        "--input_characters",
        type=int,
        default=4000,
        help="examples are left out where an input would be longer (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="seed for sampling (default: %(default)s)")


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    release: Path
    name: str = "sni"
    split: str = "default"
    instances: int = 100
    positive_examples: int = 2
    input_characters: int = 4000
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, instances=self.instances)
        require_at_least(0, positive_examples=self.positive_examples)


def prepare(data_path: Path, options: Options) -> bool:
    """Make the folder below `data_path`; False if it is complete and up to date.

    Raises:
        DataError: a list or a task is missing or malformed.
    """
    folder = options.release / "splits" / options.split
    tasks = {split: read_task_names(folder / file) for split, file in SPLITS.items()}
    if shared := set.intersection(*map(set, tasks.values())):
        raise DataError(f"{folder}: {min(shared)} is in the lists of both splits. Remove it from one of them.")
    paths = {task: task_path(options.release, task) for names in tasks.values() for task in names}
    made_from = {
        "tasks": tasks,
        "files_sha256": command.digest_files(list(paths.values())),
        "script_sha256": command.digest_files([__file__]),
        "options": {name: value for name, value in asdict(options).items() if name not in ("release", "name")},
    }

    def fill(folder: Path) -> Mapping[str, Any]:
        counts = {}
        for split, names in tasks.items():
            with open(folder / f"{split}.jsonl", "w", encoding="utf-8", newline="\n") as file:
                task_rows = (
                    row for task in tqdm(names, desc=split, unit=" tasks") for row in rows(paths[task], split, options)
                )
                counts[split] = without_answers = 0
                for row in task_rows:
                    if not row["answers"]:  # there is no label
                        without_answers += 1
                        continue
                    file.write(json.dumps({"index": counts[split], **row}) + "\n")
                    counts[split] += 1
            if not counts[split]:
                raise DataError(f"{options.release}: no instance with an answer in the split {split!r}. Add tasks.")
            counts[f"{split}_without_answers"] = without_answers
        for split in tasks:
            left_out = counts[f"{split}_without_answers"]
            text = f"{split}: {counts[split]:,} instances; {left_out:,} without an answer left out"
            command.report(text, split=split, rows=counts[split], without_answers=left_out)
        return {"counts": counts}

    return command.make_folder(data_path / options.name, COMMAND, made_from, fill) is not None


def read_task_names(path: Path) -> list[str]:
    """Read names of tasks, one per line."""
    try:
        return path.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except OSError as error:
        raise DataError(
            f"{path}: no list of tasks ({error.strerror}). Set RELEASE to a checkout of allenai/natural-instructions."
        ) from None


def task_path(release: Path, task: str) -> Path:
    """The file of a task. Raises DataError if it is missing."""
    path = release / "tasks" / f"{task}.json"
    if not path.is_file():
        raise DataError(f"{path}: missing, although a split lists this task. Check out the complete release.")
    return path


def rows(path: Path, split: str, options: Options) -> Iterator[dict[str, Any]]:
    """Yield sampled instances of a task. The label is one of the answers; scores use all of them. Without an answer the
    label is None."""
    task, most = path.stem, options.instances
    draws = Random(f"{options.seed}/{task}")
    raw = read_json(path, DataError)
    try:
        definition = with_stop(
            (raw["Definition"][0] if isinstance(raw["Definition"], list) else raw["Definition"]).strip()
        )
        examples = [
            example_text(i, example)
            for i, example in enumerate(raw["Positive Examples"][: options.positive_examples], 1)
        ]
        instances = [
            (instance["input"].strip(), [answer.strip() for answer in instance["output"]])
            for instance in raw["Instances"]
        ]
        for number, instance in enumerate(raw["Instances"]):
            check_type(instance["output"], list[str], f"{path}: Instances[{number}]: field 'output'")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: malformed task of Natural Instructions ({type(error).__name__}: {error}). "
            "Check the file out again."
        ) from None
    if split == "val":
        instances = instances[:BENCHMARK]
    if len(instances) > most:
        instances = [instances[i] for i in sorted(draws.sample(range(len(instances)), most))]
    for text, answers in instances:
        answers = [answer for answer in answers if answer]
        full_text = input_text(definition, examples, text, options.input_characters)
        check_text(full_text, f"{path}: field 'input' or an example")
        label = draws.choice(answers) if answers else None
        yield {"text": full_text, "label": label, "answers": answers, "group": task}


def input_text(definition: str, examples: Sequence[str], instance: str, most: int) -> str:
    """Text after "Definition: ": the definition, the examples that fit into `most` characters, and the instance."""
    begin = f"{definition}\n\n"
    end = with_stop(f"Now complete the following example -\nInput: {instance}") + "\nOutput:"
    fitting = ""
    for example in examples:
        if len(begin) + len(fitting) + len(example) + len(end) > most:
            break
        fitting += example
    return begin + fitting + end


def example_text(number: int, example: Mapping[str, str]) -> str:
    """Format a positive example of the task."""
    input_text = with_stop(f" Positive Example {number} -\nInput: {example['input'].strip()}")
    return f"{input_text}\n{with_stop(' Output: ' + example['output'].strip())}\n\n"


def with_stop(text: str) -> str:
    """Append a full stop to a text that does not end with punctuation."""
    return text if text[-1:] in string.punctuation else f"{text}."


def _run(data_path: Path, **options: Any) -> None:
    prepare(data_path, Options(**options))


main = command.main_of(COMMAND, __doc__, _add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
