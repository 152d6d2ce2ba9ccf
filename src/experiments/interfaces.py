"""The interface of each kind of component: methods that recipes call, with their defaults.
A new component overrides only some of them.

A component is a `Config` that an experiment names; `registry.bind` makes it from a dict. This module does not import
torch; `build`, `run`, `score` and `submit` import it when they need it.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import PlainSerializer, PlainValidator

from src.errors import ConfigError, UserError, check_all
from src.experiments.config import Config, Places, Problems
from src.experiments.dataset_protocols import Dataset, Prediction
from src.experiments.kinds import DECODER, KINDS, Architecture, FrameFormat, TokenizerSource
from src.experiments.registry import DATASETS, METRICS, MODELS, RECIPES, bind, name_of, resolved_dict
from src.support.call_once import call_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Component(Config):
    """An entry of a table of src/experiments/registry.py."""

    @property
    def name(self) -> str:
        """The component's name in an experiment."""
        return name_of(self)


class ModelConfig(Component):
    """A model, or a model around another."""

    @abstractmethod
    def build(self, places: Places) -> Any:
        """Build the torch module with its weights; new weights come from torch's global generator.
        Its `name_or_path` is the folder of the tokenizer.

        Raises:
            UserError: a file it is built from is missing or damaged.
        """

    def check(self, places: Places) -> None:
        """Raise a UserError if `build` would fail, as far as is known without loading weights."""

    def check_device(self) -> None:
        """Raise a ConfigError if this machine does not have the device that the model needs."""

    def kind(self, places: Places | None) -> str | None:
        """One of `kinds.KINDS`; None if it depends on a parent and `places` is None."""
        return DECODER

    def architecture(self, places: Places) -> Architecture | None:
        """Sizes of the model; None if unknown before it is loaded."""
        return None

    def fingerprint(self, places: Places) -> str | None:
        """Digest of the pretrained weights that `build` loads; None without pretrained weights."""
        return None

    def identity(self, places: Places) -> str | None:
        """Digest of all weights that `build` loads, including those of parents;
        None if it loads no weights or they are not trained yet."""
        return self.fingerprint(places)

    def cache_bytes(self, places: Places, value_bytes: int) -> dict[str, int] | None:
        """Cache bytes per context token, by score name; None if the sizes are unknown."""
        return None

    def tokenizer_folder(self, places: Places) -> Path | None:
        """Folder of its tokenizer, if known before the model is built."""
        return None

    def find_tokenizer(self, places: Places) -> TokenizerSource | None:
        """Its tokenizer; None if unknown before it is built, or if it cannot be built, which `check` reports."""
        try:
            call_once(self.check, places)
            folder = self.tokenizer_folder(places)
        except UserError:
            return None
        return TokenizerSource(folder, tuple(self.new_tokens())) if folder and folder.is_dir() else None

    def new_tokens(self) -> Sequence[str]:
        """Control tokens that it adds to its tokenizer."""
        return getattr(self, "extra_tokens", None) or ()

    def new_token_ids(self, places: Places) -> Sequence[int]:
        """Ids of the tokens that `build` adds to the embeddings of pretrained weights."""
        return ()

    def weight_type(self, places: Places) -> str | None:
        """Type of its weights, or its base's, in memory: "float32", "bfloat16" or "float16"; None if not configured."""
        return getattr(self, "dtype", None)

    def trained_type(self, places: Places) -> str | None:
        """Like `weight_type`, for the weights that training updates.
        Adapters and new layers are always float32."""
        return getattr(self, "dtype", None)

    def frame_format(self, places: Places) -> FrameFormat | None:
        """How it reads images; None if it does not, or if unknown before it is loaded."""
        return None

    def is_frozen(self) -> bool:
        """Whether its weights cannot be trained, only those of a wrapper around it."""
        return False

    def has_random_weights(self) -> bool:
        """Whether none of its weights has been trained."""
        return False

    def require_kind(self, required: str, places: Places | None, field: str = "model") -> None:
        """Raise ValueError if the model in `field` is known not to be of the kind `required`."""
        if (kind_of_model := self.kind(places)) not in (None, required):
            raise ValueError(
                f"{field}: expected {KINDS[required]}; got {self.name!r}, which is of the kind {kind_of_model!r}."
            )

    def check_kind(self, required: str, places: Places, field: str = "model") -> None:
        """Like `require_kind`, but raise a ConfigError."""
        try:
            self.require_kind(required, places, field)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def longest_sequence(self, places: Places) -> int | None:
        """Maximum tokens of a sequence that it can read; None if unknown or unlimited."""
        sizes = call_once(self.architecture, places)
        return sizes.max_positions if sizes else None


class NewTokens(int):
    """Maximum number of tokens of an answer, with the name of the setting."""

    setting: str

    def __new__(cls, tokens: int, setting: str = "max_new_tokens") -> Self:
        number = super().__new__(cls, tokens)
        number.setting = setting
        return number

    @staticmethod
    def name(tokens: int) -> str:
        """The setting, such as "answers.max_new_tokens"; "max_new_tokens" for a plain number."""
        return getattr(tokens, "setting", "max_new_tokens")

    @classmethod
    def longest(cls, answers: Mapping[str, Any]) -> Self:
        """The longest of `answers`, each None or with `max_new_tokens`, by the name of their setting. 0 for none."""
        numbers = [cls(each.max_new_tokens, f"{name}.max_new_tokens") for name, each in answers.items() if each]
        return max(numbers, default=cls(0))


def require_fit(field: str, tokens: int, max_positions: int | None, new_tokens: int = 0) -> None:
    """Raise ConfigError if the tokens that `field` allows, and `new_tokens` after them, are more than the positions of
    the model (None: unknown or unlimited)."""
    total = tokens + new_tokens
    if max_positions is None or total <= max_positions:
        return
    parts, advice = "", "Use fewer tokens"
    if new_tokens:
        parts, advice = f" ({tokens} + {NewTokens.name(new_tokens)} {new_tokens})", "Lower one of the two"
    raise ConfigError(
        f"{field}: {total} tokens{parts} are more than the {max_positions} positions of the model. "
        f"{advice}, or use a model with more positions."
    )


class DatasetConfig(Component):
    """The data of an experiment."""

    same_length_advice: ClassVar[str] = "Leave loop.compile out."
    """Advice in the error of `check_compiled`."""
    writer: ClassVar[str | None] = None
    """Key of `registry.WRITERS`: how people use models trained on it. None: they continue text."""
    has_order: ClassVar[bool] = False
    """Whether it has its own training order (`orders.OrderedDataset`); mixtures cannot contain it."""

    has_questions: ClassVar[bool] = False
    """Whether its data sets are `QuestionDataset`s."""

    has_contexts: ClassVar[bool] = False
    """Whether rows of questions have contexts, even if models do not read them."""

    @property
    def reads_contexts(self) -> bool:
        """Whether its questions are read with contexts, which a control can shuffle."""
        return False

    @property
    def is_measured(self) -> bool:
        """Whether its data sets are `MeasuredDataset`s."""
        return False

    @property
    def reader(self) -> str:
        """The kind of model that reads the samples, one of `kinds.KINDS`."""
        return DECODER

    @property
    def validation(self) -> "DatasetConfig":
        """The data set for validation: this one, or the part of it that the training ends with."""
        return self

    def check(self, places: Places) -> None:
        """Raise a UserError if the data are missing, malformed or too few, as far as is known without reading all rows
        and without a tokenizer."""

    def count_questions(self, places: Places, most: int) -> int | None:
        """Upper bound of the number of validation questions, at most `most`, without a tokenizer; None if unknown."""
        return None

    def first_questions(self, places: Places) -> Sequence[Prediction]:
        """The first validation questions, answered by their references, without a tokenizer; none by default."""
        return ()

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        """Raise a UserError if the data do not fit the tokenizer, loading it only if necessary. None: not known yet."""

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        """Raise ConfigError if `max_positions` (None: unknown, no limit) are too few for a sample or `new_tokens`."""

    def check_model(self, sizes: Architecture | None) -> None:
        """Raise ConfigError if a model of this architecture (None: unknown) would misread the samples."""

    def check_scores(self, places: Places) -> None:
        """Raise a UserError if a ranked reply has no score."""

    def batch_lengths(self) -> tuple[int, ...] | None:
        """Sequence lengths of every batch, such as of inputs and targets; None if batches differ in length."""
        return None

    def check_steps(self, steps: int) -> None:
        """Raise ConfigError if a training of `loop.steps` would never read part of it."""

    def check_compiled(self) -> None:
        """Raise ConfigError if `loop.compile` would recompile for each length of a batch."""
        if self.batch_lengths() is None:
            raise ConfigError(
                f"loop.compile: needs batches of one length, and those of {self.name!r} differ. "
                f"{self.same_length_advice}"
            )

    def weight(self, places: Places) -> float | None:
        """Weight in a mixture, in examples; None: the number of samples."""
        return None

    @abstractmethod
    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> Dataset:
        """The data set of one split.

        Raises:
            UserError: the data are missing, incomplete or malformed, or do not fit the tokenizer.
        """


class MetricConfig(Component):
    """A family of scores."""

    needs_contexts: ClassVar[bool] = False
    """Whether it compares answers with the contexts of their questions."""

    @abstractmethod
    def score(self, answers: Sequence[Prediction]) -> Mapping[str, list[float] | float]:
        """Scores by name: a list with one per answer, or a float for a score over all answers."""

    def score_names(self) -> Sequence[str]:
        """The names that `score` returns. Override this if loading the metric's library is slow."""
        return list(self.score([]))

    def check(self) -> None:
        """Raise a UserError if `score` would fail, as far as this is known without answers."""

    def check_data(self, data: DatasetConfig, places: Places) -> None:
        """Raise a UserError if even correct answers to the data's questions would get no score."""

    def set_scores(self) -> Sequence[str]:
        """The names of scores over all answers, which are not lists."""
        return ()


class RecipeConfig(Component):
    """An experiment, without its "recipe" key."""

    @abstractmethod
    def checks(self, places: Places) -> list[Callable[[], object]]:
        """Checks that load nothing; each raises a UserError for an experiment that would fail."""

    def check(self, places: Places) -> None:
        """Raise one ConfigError with a line for everything that is known to fail."""
        check_all(*self.with_steps(places).checks(places))

    def with_steps(self, places: Places) -> Self:
        """The experiment with the number of optimizer steps that it leaves open; itself if it states the number.

        Raises:
            UserError: the number cannot be computed.
        """
        return self

    def check_device(self) -> None:
        """Raise a ConfigError if this machine, where the experiment will run, does not have the required device."""

    @abstractmethod
    def run(self, run: Any) -> None:
        """Train, or resume, the experiment of the `runs.context.Run`. Collective."""


ModelField = Annotated[ModelConfig, PlainValidator(partial(bind, MODELS)), PlainSerializer(resolved_dict)]
DatasetField = Annotated[DatasetConfig, PlainValidator(partial(bind, DATASETS)), PlainSerializer(resolved_dict)]
MetricField = Annotated[MetricConfig, PlainValidator(partial(bind, METRICS)), PlainSerializer(resolved_dict)]


FORWARDED_METHODS = (
    *(
        "architecture",
        "cache_bytes",
        "check_device",
        "find_tokenizer",
        "fingerprint",
        "frame_format",
        "has_random_weights",
        "is_frozen",
    ),
    *("new_token_ids", "new_tokens", "tokenizer_folder", "trained_type", "weight_type"),
)
"""Methods that a `WrapperConfig` forwards to its base."""


class WrapperConfig(ModelConfig):
    """A model around `base`. Forwards `FORWARDED_METHODS` to it, unless a subclass overrides them."""

    base: ModelField

    def check_base(self, places: Places, required: str, field: str = "model.base") -> None:
        """Raise a UserError if the base cannot be built, or is of another kind than required."""
        call_once(self.base.check, places)
        self.base.check_kind(required, places, field)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: WrapperConfig, *places: Places) -> Any:
        return call_once(getattr(self.base, name), *places)

    method.__name__ = name  # a part of the key of `call_once`
    return method


for _name in FORWARDED_METHODS:
    setattr(WrapperConfig, _name, _forward(_name))


def load_experiment(raw: dict[str, Any], where: str) -> RecipeConfig:
    """The recipe that an experiment dict names, as its config.

    Raises:
        ConfigError: one line for each mistake, with `where` and the dotted path.
    """
    try:
        return bind(RECIPES, raw, key="recipe")
    except Problems as error:
        text = "\n".join(f"{where}{'.' if path else ''}{path}: {message}" for path, message in error.problems)
        raise ConfigError(text) from None
