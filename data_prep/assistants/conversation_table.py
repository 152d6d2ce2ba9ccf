"""Releases of conversations and preferences: entries of resources/conversations/*.yaml or of your own file.

An entry names the source of a release, the form of its rows, and the validation rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from data_prep.assistants.conversation_forms import columns, comparisons, dialogue, layouts, rows, translation, trees
from data_prep.assistants.conversation_forms.rows import Form
from src.errors import ConfigError, DataError
from src.experiments.config import Config, join, problems, unknown_text
from src.experiments.config import load as load_config
from src.files import ROOT, read_yaml

FOLDER = ROOT / "resources" / "conversations"
FORMS: Mapping[str, type[Form]] = {
    "alpaca": layouts.Alpaca,
    "augmented": comparisons.AugmentedReplies,
    "columns": columns.Columns,
    "completion": layouts.Completion,
    "dialogues": comparisons.Dialogues,
    "divemt": translation.DiveMT,
    "endings": comparisons.Endings,
    "gpt4all": dialogue.GPT4All,
    "marked": dialogue.MarkedTurns,
    "messages": layouts.Messages,
    "oasst": trees.Threads,
    "oasst_ranked": trees.RankedReplies,
    "pairs": layouts.Pairs,
    "programs": columns.Programs,
    "prosocial": dialogue.Prosocial,
    "ranked": layouts.RankedReplies,
    "rounds": dialogue.Rounds,
    "scored": comparisons.ScoredReplies,
    "sharegpt": dialogue.ShareGPT,
    "soda": dialogue.Soda,
    "text": layouts.Text,
    "translation": translation.Translations,
    "wins": comparisons.Wins,
}
SCRIPTS = tuple(map(str, sorted(Path(rows.__file__).parent.glob("*.py"))))
REQUESTS = translation.REQUESTS
"""Prepared rows depend on this file and on `SCRIPTS`."""
Mode = Literal["sft", "rm"]
OUR_KEYS = ("messages", "replies", "prompt", "tools", "text", rows.SPLIT_NAME)
"""Keys of prepared rows, which `keep` cannot name."""


class Release(Config):
    """One entry of the table, without its name. "{pair}" in a name matches any text, as in wmt2019_de-en."""

    hub: str | None = None
    """ID of a data set on the hub, or ID@CONFIG. None: `train` and `val` are files next to the file of the entry."""
    revision: str | None = None
    """Revision on the hub; None: the newest."""
    files: list[str] = []
    """Files on the hub to read; empty: all."""
    url: str | None = None
    """Address of a file that is not on the hub."""
    train: list[str] = []
    """Splits on the hub, or files, to train on."""
    val: list[str] = []
    """Splits or files for validation; empty: a share of `train`, by the first message."""
    val_rate: float = Field(default=0.2, gt=0, lt=1)
    """Share of `train` that is used for validation if `val` is empty."""
    split_column: str | None = None
    """Column with the split of a row: values that start with "val" or "test" are for validation."""
    licence: str = Field(min_length=1)
    """License stated by the release; "unstated" if it states none."""
    modes: list[Mode] = Field(default=["sft"], min_length=1)
    """Modes it can be prepared for, the default first: sft (answers to learn) or rm (ranked replies)."""
    form: str | dict[str, Any]
    """Name in `FORMS`, or {"name": name, option: value}."""
    ranked_form: str | dict[str, Any] | None = None
    """Form for mode rm; None: `form`."""
    columns: dict[str, str] = {}
    """{column of the form: column of the release}."""
    group_by: str | None = None
    """Dotted path of a column: rows with the same value are read together."""
    without_refusals: bool = False
    """Whether to skip rows in which the assistant refuses or says that it is a model."""
    join_characters: int | None = Field(default=None, gt=0)
    """Length up to which conversations with the same system message are joined, in order."""
    shots: float = Field(default=0.0, ge=0, le=1)
    """Share of the conversations that get one of the previous five as an example."""
    keep: list[str] = []
    """Columns to copy into prepared rows, by their names in the form: "answer" or "tests" for rewards, or any other."""
    negatives: Literal["refuse", "skip", "learn"] = "refuse"
    """Treatment in mode sft of rows with a bad answer: `label` or `kto_tag` is false."""
    max_rows: int | None = Field(default=None, gt=0)
    """Maximum number of prepared rows per split; the first ones are used."""

    @model_validator(mode="after")
    def _check_forms(self) -> "Release":
        for field, form in (("form", self.form), ("ranked_form", self.ranked_form)):
            if form is not None:
                load_form(form, field)
        if self.ranked_form is not None and "rm" not in self.modes:
            raise ValueError("ranked_form: needs mode rm in `modes`. Add it, or remove ranked_form.")
        if self.split_column is not None and (self.group_by is not None or self.val):
            raise ValueError(
                "split_column: cannot be combined with group_by or val. Remove split_column, or these two."
            )
        for name in self.keep:
            if name in OUR_KEYS:
                raise ValueError(f"keep: {name!r} is already a key of prepared rows. Rename the column with `columns`.")
        if self.keep and self.join_characters is not None:
            raise ValueError(
                "keep: cannot be combined with join_characters, which joins several rows. Remove one of them."
            )
        if self.hub is not None and not self.train:
            raise ValueError("train: missing. List the splits of the hub's data set for training, such as ['train'].")
        return self

    def form_of(self, mode: Mode) -> Form:
        """The form that reads rows for a mode."""
        return load_form(self.ranked_form if mode == "rm" and self.ranked_form is not None else self.form, "form")


def load_form(raw: str | Mapping[str, Any], where: str) -> Form:
    """Load a form from its name, or from {"name": name, option: value}.

    Raises:
        ValueError: there is no such form, or an option is wrong.
    """
    options = {"name": raw} if isinstance(raw, str) else {**raw}
    name = str(options.pop("name", ""))
    if name not in FORMS:
        raise ValueError(f"{where}: {unknown_text('form', name, FORMS)}")
    try:
        return FORMS[name].model_validate(options)
    except ValidationError as error:
        raise ValueError(
            " ".join(f"{join(where, path)}: {text}" for path, text in problems(FORMS[name], error))
        ) from None


def find(name: str, extra: Path | None = None) -> tuple[Release, Path]:
    """The release called `name`, and the file of its entry.
    extra: a file with entries that take precedence over resources/conversations.

    Raises:
        ConfigError: no file has this entry, or a field of it is invalid.
    """
    paths = dict[str, Path]()
    for path in [*([extra] if extra else []), *sorted(FOLDER.glob("*.yaml"))]:
        for key, raw in read_yaml(path, "releases by name").items():
            paths.setdefault(str(key), path)
            before, sign, after = str(key).partition("{pair}")
            pair = (
                name[len(before) : len(name) - len(after)]
                if sign and name.startswith(before) and name.endswith(after)
                else ""
            )
            if key == name or (pair and pair != sign):
                return load_config(Release, _fill_pair(raw, pair), f"{path}: {key}"), path
    raise ConfigError(
        f"--name: {unknown_text('release', name, paths, str(FOLDER.relative_to(ROOT)))} "
        "Add an entry to a file of your own (--release_file), or describe the rows with --form."
    )


def names(mode: Mode | None = None) -> list[str]:
    """Names of all releases in resources/conversations, or of those for a mode, sorted."""
    entries = {key: raw for path in FOLDER.glob("*.yaml") for key, raw in read_yaml(path, "releases by name").items()}
    return sorted(key for key, raw in entries.items() if mode is None or mode in raw.get("modes", ["sft"]))


def sources_of(release: Release, split: Literal["train", "val"], path: Path) -> list[str]:
    """The sources of a split, as `sources.open_rows` takes them. path: the file of the entry."""
    names = release.train if split == "train" else release.val
    if release.hub is not None:
        return [f"hub:{release.hub}#{name}" for name in names]
    if split == "train" and not names:
        raise DataError(
            f"--train: missing. The hub does not have this release; name its file, which is from "
            f"{release.url or 'your own data'}."
        )
    return [str(path.parent / name) for name in names]


def _fill_pair(raw: Any, pair: str) -> Any:
    """Replace "{pair}" in all texts of an entry by `pair`."""
    if isinstance(raw, str):
        return raw.replace("{pair}", pair)
    if isinstance(raw, dict):
        return {key: _fill_pair(value, pair) for key, value in raw.items()}
    return [_fill_pair(value, pair) for value in raw] if isinstance(raw, list) else raw
