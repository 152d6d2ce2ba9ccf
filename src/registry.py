"""Every name that an experiment can use, and the module that it leads to. Imports none of them until one is used."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, ValidationError

from src.config import Config, Places, Problems, problems, unknown_text
from src.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Table:
    """Names of one kind; each leads to a module that has a `Config` and the verb."""

    kind: str
    verb: str
    modules: Mapping[str, str]


RECIPES = Table(
    "recipe",
    "run",
    {
        "crossattn": "src.recipes.crossattn",
        "fid": "src.recipes.fid",
        "lm": "src.recipes.lm",
        "prompted": "src.recipes.prompted",
        "seq2seq": "src.recipes.seq2seq",
        "t5_pretrain": "src.recipes.t5_pretrain",
    },
)
MODELS = Table(
    "model",
    "build",
    {
        "cross_attention": "src.models.cross_attention.config",
        "experiment": "src.models.trained_model",
        "fusion_in_decoder": "src.models.fusion_in_decoder.config",
        "gpt_bigcode": "src.models.gpt_bigcode",
        "hf": "src.models.hf",
        "lora": "src.models.lora",
        "t5": "src.models.t5.config",
    },
)
DATASETS = Table(
    "dataset",
    "build",
    {
        "depth": "src.data.denoising.depth.dataset",
        "fid_qa": "src.data.qa.fid",
        "mixture": "src.data.mixture.dataset",
        "prefix_lm": "src.data.denoising.prefix_lm",
        "prompted_qa": "src.data.qa.prompted",
        "qa": "src.data.qa.cross_attention",
        "span_corruption": "src.data.denoising.span_corruption",
        "task": "src.data.tasks.dataset",
        "text": "src.data.text.dataset",
        "ul2": "src.data.denoising.ul2",
    },
)
METRICS = Table(
    "metric",
    "score",
    {
        "bleu": "src.metrics.bleu",
        "classification": "src.metrics.classification",
        "knowledge": "src.metrics.knowledge",
        "meteor": "src.metrics.meteor",
        "rouge": "src.metrics.rouge",
        "squad": "src.metrics.squad",
    },
)
LAUNCHERS = Table(
    "launcher",
    "submit",
    {
        "local": "src.launch.local.launcher",
        "slurm": "src.launch.slurm.launcher",
        "toolkit": "src.launch.toolkit.launcher",
    },
)
REWARDS = Table("reward", "score", {})
TABLES = (RECIPES, MODELS, DATASETS, METRICS, LAUNCHERS, REWARDS)


_answers: dict[Any, Any] | None = None


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Within the block, `Part.ask` asks equal parts once: a thousand experiments on one data set look at its files once.

    Nothing that is asked about may change in it.
    """
    global _answers  # noqa: PLW0603  a memory of one block, not of the process
    _answers = {}
    try:
        yield
    finally:
        _answers = None


@dataclass(frozen=True)
class Part:
    """A named entry of a table, bound to its checked config. Calling it calls the verb of its module.

    The modules of the tables import no torch when they are imported; their verbs do.
    """

    table: Table
    name: str
    config: Config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._module(), self.table.verb)(self.config, *args, **kwargs)

    def function(self, name: str) -> Callable[..., Any] | None:
        """Another public function of the module, bound to the config, or None where the module has none of that name."""
        found = getattr(self._module(), name, None)
        return partial(found, self.config) if found else None

    def ask(self, name: str, *args: Any) -> Any:
        """Call `function(name)`, where the module has it; else None. "check" raises a UserError for what will fail, and loads nothing."""
        found = self.function(name)
        if found is None:
            return None
        if _answers is None:
            return found(*args)
        try:
            key = (self, name, tuple(id(a) if isinstance(a, Places) else a for a in args))
            if key not in _answers:
                _answers[key] = found(*args)
        except TypeError:  # a config that holds a list has no hash
            return found(*args)
        return _answers[key]

    def _module(self) -> Any:
        return import_module(self.table.modules[self.name])


def bind(table: Table, raw: Any, key: str = "name") -> Part:
    """Look up `raw[key]` in `table` and check the rest of `raw` against the Config found there.

    Raises:
        Problems: everything wrong with `raw`, by path.
    """
    if isinstance(raw, Part):
        return raw
    if not isinstance(raw, dict):
        raise Problems([("", f"expected a dict with {key!r}, got {raw!r} ({type(raw).__name__}).")])
    if key not in raw:
        raise Problems([(key, f"missing. Known: {', '.join(sorted(table.modules))}.")])
    name = raw[key]
    if not isinstance(name, str):
        raise Problems([(key, f"expected str, got {name!r} ({type(name).__name__}).")])
    if name not in table.modules:
        raise Problems([(key, unknown_text(table.kind, name, table.modules))])
    cls: type[Config] = import_module(table.modules[name]).Config
    try:
        return Part(table, name, cls.model_validate({k: v for k, v in raw.items() if k != key}))
    except ValidationError as error:
        raise Problems(problems(cls, error)) from None


def resolved(part: Part, key: str = "name") -> dict[str, Any]:
    """The dict of `part` with every default written out, JSON values only."""
    return {key: part.name, **part.config.model_dump(mode="json")}


_WRITTEN = PlainSerializer(resolved)
Model = Annotated[Part, PlainValidator(partial(bind, MODELS)), _WRITTEN]
Dataset = Annotated[Part, PlainValidator(partial(bind, DATASETS)), _WRITTEN]
Metric = Annotated[Part, PlainValidator(partial(bind, METRICS)), _WRITTEN]
Reward = Annotated[Part, PlainValidator(partial(bind, REWARDS)), _WRITTEN]


def max_positions(model: Part, places: Places) -> int | None:
    """Most tokens of a sequence that `model` can read; None where only loading it would tell."""
    sizes = model.ask("architecture", places)
    return sizes.max_positions if sizes else None


DECODER, CROSS_ATTENTION, ENCODER_DECODER, FUSION_IN_DECODER = "decoder", "cross_attention", "encoder_decoder", "fusion_in_decoder"
KINDS = {
    DECODER: "a decoder, such as 'hf' or 'gpt_bigcode'",
    CROSS_ATTENTION: "'cross_attention' around a decoder",
    ENCODER_DECODER: "an encoder-decoder, such as 't5'",
    FUSION_IN_DECODER: "'fusion_in_decoder' around an encoder-decoder",
}
"""Kinds of models by what they read, and what a person writes to get one."""


def kind_of(model: Part, places: Places | None) -> str | None:
    """Which of `KINDS` a model is; None where only `places`, or the save directory of a parent, would tell."""
    if model.ask("reads_contexts"):
        return CROSS_ATTENTION
    if model.function("kind") is None:
        return DECODER
    return model.ask("kind", places)


def require_kind(model: Part, wanted: str, places: Places | None, field: str = "model") -> None:
    """Raises ValueError where `model`, which stands in `field`, is known to be of another kind than `wanted`, one of `KINDS`."""
    found = kind_of(model, places)
    if found not in (None, wanted):
        raise ValueError(f"{field}: expected {KINDS[wanted]}; got {model.name!r}, which is of the kind {found!r}.")


def check_kind(model: Part, wanted: str, places: Places) -> None:
    """`require_kind` before a start: a ConfigError where `model` is of another kind."""
    try:
        require_kind(model, wanted, places)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def load_experiment(raw: dict[str, Any], where: str) -> Part:
    """The recipe of an experiment dict, bound to its config.

    Raises:
        ConfigError: one line for each mistake, each beginning with `where` and the dotted path.
    """
    try:
        return bind(RECIPES, raw, key="recipe")
    except Problems as error:
        text = "\n".join(f"{where}{'.' if path else ''}{path}: {message}" for path, message in error.found)
        raise ConfigError(text) from None


def canonical(raw: dict[str, Any], recipe: Part) -> dict[str, Any]:
    """`raw` with 1 written as 1.0 wherever the config takes a float, so that one experiment has one id."""
    return _spelled(raw, recipe)


def _spelled(raw: Any, loaded: Any) -> Any:
    if isinstance(loaded, Part):
        loaded = loaded.config
    if isinstance(raw, dict):
        inner = vars(loaded) if isinstance(loaded, Config) else loaded if isinstance(loaded, dict) else {}
        return {k: _spelled(v, inner.get(k)) for k, v in raw.items()}
    if isinstance(raw, list):
        items = loaded if isinstance(loaded, (list, tuple)) else [None] * len(raw)
        return [_spelled(r, x) for r, x in zip(raw, items, strict=True)]
    return float(raw) if type(raw) is int and type(loaded) is float else raw
