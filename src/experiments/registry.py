"""Every name that an experiment can use, and its module. A module is imported when its name is first used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter, ValidationError

from src.experiments.config import Config, Problems, describe_value, is_operational, join, problems, unknown_text


@dataclass(frozen=True, eq=False)
class ComponentTable:
    """Names of one kind, each with the module that implements its interface (src/experiments/interfaces.py) as
    `Config`."""

    kind: str
    modules: Mapping[str, str]


RECIPES = ComponentTable(
    "recipe",
    {
        "crossattn": "src.systems.crossattn.recipe",
        "dpo": "src.systems.assistants.dpo",
        "fid": "src.systems.crossattn.fid",
        "grpo": "src.systems.assistants.grpo",
        "interleaved": "src.systems.interleaved.recipe",
        "kto": "src.systems.assistants.preferences.kto",
        "lm": "src.recipes.lm",
        "metadata_lm": "src.systems.metadata.recipe",
        "ppo": "src.systems.assistants.ppo",
        "prompted": "src.systems.crossattn.prompted",
        "reward": "src.systems.assistants.reward",
        "seq2seq": "src.systems.t5.seq2seq",
        "sft": "src.systems.assistants.sft",
        "t5_pretrain": "src.systems.t5.pretrain",
    },
)
MODELS = ComponentTable(
    "model",
    {
        "cross_attention": "src.systems.crossattn.model.config",
        "experiment": "src.models.trained_model",
        "fusion_in_decoder": "src.systems.crossattn.fusion_in_decoder.config",
        "gpt_bigcode": "src.models.gpt_bigcode",
        "hf": "src.models.hf",
        "lora": "src.models.lora",
        "regularized": "src.systems.assistants.model.regularized",
        "reward": "src.systems.assistants.model.config",
        "t5": "src.systems.t5.model.config",
        "vision_language": "src.systems.interleaved.model.config",
        "vision_language_hf": "src.systems.interleaved.model.pretrained",
        "vision_language_parts": "src.systems.interleaved.model.assembled",
        "with_values": "src.systems.assistants.model.values",
    },
)
DATASETS = ComponentTable(
    "dataset",
    {
        "conversations": "src.systems.assistants.conversations.dataset",
        "depth": "src.systems.t5.denoising.depth.dataset",
        "documents": "src.data.text.whole_documents",
        "fid_qa": "src.systems.crossattn.data.fid",
        "labeled_replies": "src.systems.assistants.conversations.labeled",
        "metadata": "src.systems.metadata.data.dataset",
        "mixture": "src.data.mixture.dataset",
        "packed": "src.data.packing.dataset",
        "phases": "src.data.phases",
        "prefix_lm": "src.systems.t5.denoising.prefix_lm",
        "prompted_qa": "src.systems.crossattn.data.prompted",
        "qa": "src.systems.crossattn.data.cross_attention",
        "ranked_replies": "src.systems.assistants.conversations.ranked",
        "rollouts": "src.systems.assistants.rollouts.dataset",
        "span_corruption": "src.systems.t5.denoising.span_corruption",
        "streamed": "src.systems.interleaved.streaming.dataset",
        "task": "src.systems.t5.tasks.dataset",
        "text": "src.data.text.dataset",
        "ul2": "src.systems.t5.denoising.ul2",
    },
)
METRICS = ComponentTable(
    "metric",
    {
        "bleu": "src.evaluation.metrics.bleu",
        "classification": "src.evaluation.metrics.classification",
        "expressions": "src.evaluation.metrics.expressions",
        "knowledge": "src.evaluation.metrics.knowledge",
        "math": "src.evaluation.metrics.math",
        "meteor": "src.evaluation.metrics.meteor",
        "rouge": "src.evaluation.metrics.rouge",
        "squad": "src.evaluation.metrics.squad",
        "words": "src.evaluation.metrics.words",
    },
)
REWARDS = ComponentTable(
    "reward",
    {
        "expressions": "src.systems.assistants.rewards.expressions",
        "format": "src.systems.assistants.rewards.format",
        "length": "src.systems.assistants.rewards.length",
        "math": "src.systems.assistants.rewards.math",
        "python": "src.systems.assistants.rewards.python",
        "reward_model": "src.systems.assistants.rewards.reward_model",
    },
)
LAUNCHERS = ComponentTable(
    "launcher",
    {
        "local": "src.launch.local.launcher",
        "ray": "src.launch.ray.launcher",
        "slurm": "src.launch.slurm.launcher",
        "toolkit": "src.launch.toolkit.launcher",
    },
)
WRITERS = {
    "conversation": "src.systems.assistants.serving.conversation.Talk",
    "metadata": "src.systems.metadata.writer.MetadataWriter",
}
"""By `DatasetConfig.writer`: the class (a src.serving.writer.Writer) through which people use a model."""
TABLES = (RECIPES, MODELS, DATASETS, METRICS, REWARDS, LAUNCHERS)


def name_of(component: Config) -> str:
    """The name of a component in its table."""
    module = type(component).__module__
    names = [name for table in TABLES for name, path in table.modules.items() if path == module]
    if not names:
        raise LookupError(f"{module} is in no table of src/experiments/registry.py")
    return names[0]


def is_component(config: Config) -> bool:
    """Whether a config is selected by a name of a table."""
    return type(config).__name__ == "Config" and any(
        type(config).__module__ in table.modules.values() for table in TABLES
    )


def bind(table: ComponentTable, raw: Any, key: str = "name") -> Any:
    """The Config of the component that `raw[key]` names in `table`, made from the rest of `raw`.

    Raises:
        Problems: everything wrong with `raw`, by path.
    """
    if isinstance(raw, Config) and type(raw).__module__ in table.modules.values():
        return raw
    if not isinstance(raw, dict):
        raise Problems([("", f"expected a dict with {key!r}, got {describe_value(raw)}.")])
    if key not in raw:
        raise Problems([(key, f"missing. Known: {', '.join(sorted(table.modules))}.")])
    name = raw[key]
    if not isinstance(name, str):
        raise Problems([(key, f"expected str, got {describe_value(name)}.")])
    if name not in table.modules:
        raise Problems([(key, unknown_text(table.kind, name, table.modules))])
    cls: type[Config] = import_module(table.modules[name]).Config
    try:
        return cls.model_validate({k: v for k, v in raw.items() if k != key})
    except ValidationError as error:
        raise Problems(problems(cls, error)) from None


def resolved_dict(component: Config, key: str = "name") -> dict[str, Any]:
    """The dict of `component` with every default written out, JSON values only."""
    return {key: name_of(component), **component.model_dump(mode="json")}


def sparse_dict(value: Any) -> Any:
    """The shortest JSON for `value`: configs without the fields that are at their default."""
    if value is None:
        return {}
    if not isinstance(value, Config):
        return TypeAdapter(Any).dump_python(value, mode="json")
    fields = type(value).model_fields.items()
    changed = {name for name, info in fields if getattr(value, name) != info.get_default(call_default_factory=True)}
    name = {"name": name_of(value)} if is_component(value) else {}
    return {**name, **value.model_dump(mode="json", include=changed)}


def canonical_dict(raw: Any, loaded: Any, leaves_out: Callable[[Any, str], bool] = is_operational) -> Any:
    """`raw`, the JSON of the config `loaded`, in the form that is hashed: 1 as 1.0 for float fields, without
    operational fields. leaves_out: (config, name) -> whether to leave out a field, at every depth."""
    if isinstance(raw, dict):
        inner = vars(loaded) if isinstance(loaded, Config) else loaded if isinstance(loaded, dict) else {}
        return {k: canonical_dict(v, inner.get(k), leaves_out) for k, v in raw.items() if not leaves_out(loaded, k)}
    if isinstance(raw, list):
        items = loaded if isinstance(loaded, (list, tuple)) else [None] * len(raw)
        return [canonical_dict(r, x, leaves_out) for r, x in zip(raw, items, strict=True)]
    return float(raw) if type(raw) is int and type(loaded) is float else raw


def operational_values(raw: Any, loaded: Any, path: str = "") -> dict[str, Any]:
    """The operational values in `raw` by their dotted path: those that `canonical_dict` drops.
    Lists are not searched."""
    if not isinstance(raw, dict):
        return {}
    inner = vars(loaded) if isinstance(loaded, Config) else loaded if isinstance(loaded, dict) else {}
    values = dict[str, Any]()
    for key, value in raw.items():
        if is_operational(loaded, key):
            values[join(path, key)] = value
        else:
            values |= operational_values(value, inner.get(key), join(path, key))
    return values
