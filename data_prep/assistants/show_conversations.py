"""Show the data of a training on conversations: `python -m data_prep.assistants.show_conversations assistant_tiny_sft`.

The experiment is one of exp_configs.py, GROUP or GROUP[3], with recipe `sft`, `reward`, `dpo` or `kto`. Prints samples
of its first micro-batch, with tokens colored by role and underlined if they are trained on; how much of each data set
an epoch reads and how often training reads it; and the memory plan of one GPU. Output to a file has no colors: tokens
that are trained on are in [[ ]] after their role. No weights are loaded, and nothing is written.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import command
from src.data.mixture.dataset import MixtureDataset
from src.data.orders import RankShare, order_of
from src.data.packing.dataset import PackedDataset
from src.data.text import tokenizers
from src.errors import ConfigError, UserError
from src.experiments.config import GROUP_LIST, Places, top_level, unknown_text
from src.experiments.dataset_protocols import Dataset
from src.experiments.grid import BrokenGroup, deferred_errors
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import canonical_dict
from src.support.command_line import aligned_lines, require_at_least
from src.systems.assistants.conversations.dataset import Conversations
from src.systems.assistants.conversations.labeled import LabeledReplies
from src.systems.assistants.conversations.ranked import RankedReplies
from src.systems.assistants.conversations.rendering import Rendered, Role

COMMAND = "python -m data_prep.assistants.show_conversations"
RECIPES = ("sft", "reward", "dpo", "kto")
COLOURS = {Role.TEMPLATE: 90, Role.SYSTEM: 35, Role.USER: 36, Role.ASSISTANT: 32, Role.TOOL: 33, Role.TEXT: 39}
"""ANSI color codes."""
_SAMPLES_TO_COUNT = 100
"""Number of samples per data set for the token counts."""
_FORMATS = ("{}", "{:,}", "{:,.0f}", "{:.3g} times", "{:.1f}", "{:.0%}")
"""Columns of the table of data sets."""


class SampleView(NamedTuple):
    """A conversation of a sample, as training reads it."""

    source: str
    number: int
    ids: Sequence[int]
    roles: Sequence[int]
    learned_mask: Sequence[bool]


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("experiment", metavar="EXP", help="GROUP (shows its first experiment) or GROUP[3]")
    add(
        "-sb",
        "--savedir_base",
        type=Path,
        default=Path("results/runs"),
        metavar="DIR",
        help="runs of parents (default: %(default)s)",
    )
    add(
        "--samples",
        type=int,
        default=4,
        metavar="N",
        help="of the first micro-batch that are printed (default: %(default)s)",
    )
    add(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: where a terminal shows them (default: %(default)s)",
    )


def show(experiment: str, data_path: Path, savedir_base: Path, samples: int = 4, color: str = "auto") -> None:
    """Print the data of an experiment.

    Raises:
        ConfigError: there is no such experiment, or it does not train on conversations.
        DataError: its data or its tokenizer are missing or malformed.
    """
    require_at_least(1, samples=samples)
    import torch

    groups = _read_groups()
    exp = find_experiment(groups, experiment)
    recipe: Any = load_experiment(exp, experiment)
    if exp.get("recipe") not in RECIPES or recipe.loop is None:
        raise ConfigError(
            f"{experiment}: trains on no conversations. "
            f"Name an experiment of recipe {', '.join(RECIPES)} that has a loop."
        )
    places = Places(data_path, savedir_base, dict(_experiments_by_id(groups)))
    recipe = recipe.with_steps(places)
    with torch.device("meta"):
        model = recipe.model.build(replace(places, on_paper=True))
    tokenizer = tokenizers.load(model.name_or_path, recipe.model.new_tokens())
    train, val = (recipe.data.build(places, tokenizer, split, recipe.seed) for split in ("train", "val"))
    loop = recipe.loop
    keys = first_step(train, recipe.seed, loop)
    is_colored = color == "always" or (color == "auto" and sys.stdout.isatty())
    if is_colored:
        colours = "  ".join(paint(role.name.lower(), role, is_learned=False) for role in COLOURS)
        command.report(f"{colours}  \x1b[4mlearned\x1b[0m\n")
    sample_keys = [
        (name, data, *epoch_and_index)
        for key in keys[: loop.micro_batch]
        for name, data, *epoch_and_index in locate(experiment, train, key)
    ]
    for name, data, epoch, index in sample_keys[:samples]:
        for view in read_sample(name, data, epoch, index):
            num_learned, text = sum(view.learned_mask), write(view, tokenizer, is_colored)
            command.report(
                f"{view.source} {view.number}: {len(view.ids)} tokens, {num_learned} learned\n{text}\n",
                source=view.source,
                number=view.number,
                tokens=len(view.ids),
                learned=num_learned,
                text=text,
            )
    per_step = sum(1 for key in keys for _ in locate("", train, key))
    mixture = list(describe_mixture(experiment, train, loop.steps * per_step))
    cells = [[text.format(value) for text, value in zip(_FORMATS, row.values(), strict=True)] for row in mixture]
    lines = aligned_lines([list(mixture[0]), *cells])
    command.report("\n".join(lines), mixture=mixture)
    command.report(f"validation: {len(val):,} samples", validation_samples=len(val))
    report_memory(recipe, places)


def report_memory(recipe: Any, places: Places) -> None:
    """Print the memory plan of training on one GPU, or the reason why it is unknown."""
    try:
        plan = recipe.plan_memory(places, gpus=1, gpu="H100")
    except UserError as error:
        command.report(f"memory of a GPU: {error}", memory=None, reason=str(error))
        return
    gib = {name: size / 2**30 for name, size in (("total", plan.total), *plan.parts.items())}
    parts = ", ".join(f"{name} {size:.2f}" for name, size in gib.items() if name != "total")
    text = (
        f"memory of a GPU: {gib['total']:.2f} GiB ({parts}); "
        "trainval.py --dry-run --memory plans other ways to train it"
    )
    command.report(text, memory=gib)


def _read_groups() -> Any:
    with deferred_errors():
        return top_level("exp_configs", "EXP_GROUPS")


def find_experiment(groups: Any, name: str) -> dict[str, Any]:
    """Find the experiment "GROUP[3]", or "GROUP", which is the first of the group.

    Raises:
        ConfigError: there is no such experiment.
    """
    one = None if name in groups else re.fullmatch(r"(.+)\[(\d{1,9})\]", name)
    group, number = (one[1], int(one[2])) if one else (name, 0)
    if group not in groups:
        raise ConfigError(unknown_text("group", group, groups, GROUP_LIST))
    if isinstance(groups[group], BrokenGroup):
        raise ConfigError(f"{group}: {groups[group].error}")
    if number >= len(groups[group]):
        raise ConfigError(
            f"{name}: the group has {len(groups[group])} experiments. "
            f"Use {group}[0] to {group}[{len(groups[group]) - 1}]."
        )
    return groups[group][number]


def _experiments_by_id(groups: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Experiments of all readable groups by id, including parents that are not trained yet."""
    for name, group in groups.items():
        for exp in () if isinstance(group, BrokenGroup) else group:
            try:
                canonical = canonical_dict(exp, load_experiment(exp, name))
            except ConfigError:
                continue
            yield exp_id(canonical), canonical


def first_step(train: Dataset, seed: int, loop: Any) -> list[tuple[Any, ...]]:
    """Keys of all samples of the first optimizer step. loop: a `LoopConfig`."""
    order = order_of(train, seed, loop.sequences_per_step, loop.steps)
    share = RankShare(loop.sequences_per_step, loop.micro_batch, 0, 1)
    batches = itertools.islice(order.micro_batches(0, share, {}), len(share.numbers))
    return [key for batch in batches for key in batch.keys]


def locate(name: str, data: Any, key: Sequence[Any]) -> Iterator[tuple[str, Any, int, int]]:
    """Yield (name, data set, epoch, index) of the conversation of a key, which can be in a part of a mixture.
    For a packed row, yields all of its conversations."""
    if isinstance(data, PackedDataset):
        for i in range(0, len(key), 3):
            yield from locate(name, data.documents, key[i : i + 2])
    elif isinstance(data, MixtureDataset):
        part, *local_key = data.locate(*key)
        yield from locate(part, data.parts[part], local_key)
    else:
        epoch, index = key
        yield name, data, epoch, index


def read_sample(name: str, data: Any, epoch: int, index: int) -> list[SampleView]:
    """The conversation of a sample; for ranked or labeled replies, one conversation per reply."""
    rendered: list[Rendered]
    if isinstance(data, Conversations):
        rendered, masks = [data.render(epoch, index)], [data.sample(epoch, index)["loss_mask"]]
    elif isinstance(data, RankedReplies | LabeledReplies):
        rendered = data.render(epoch, index)
        masks = [each.loss_mask for each in rendered]
    else:
        raise ConfigError(
            f"{name}: a {type(data).__name__} has no conversations. "
            "Name a data set 'conversations', 'ranked_replies' or 'labeled_replies'."
        )
    return [SampleView(name, index, each.ids, each.roles, mask) for each, mask in zip(rendered, masks, strict=True)]


def write(view: SampleView, tokenizer: Any, is_colored: bool) -> str:
    """The text of a sample, with the role and loss mask of its tokens."""
    text = ""
    tokens = zip(view.ids, view.roles, view.learned_mask, strict=True)
    for (role, is_learned), group in itertools.groupby(tokens, key=lambda token: (Role(token[1]), token[2])):
        part = tokenizer.decode([token for token, _, _ in group])
        if is_colored:
            text += paint(part, role, is_learned)
        else:
            text += f"{role.name.lower()}[[{part}]]" if is_learned else part
    return text


def paint(text: str, role: Role, is_learned: bool) -> str:
    """Color a text by role, line by line for pagers."""
    code = f"\x1b[{COLOURS[role]}{';4' if is_learned else ''}m"
    return "\n".join(f"{code}{line}\x1b[0m" if line else "" for line in text.split("\n"))


def describe_mixture(name: str, train: Any, read: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table of data sets. read: number of conversations that the run reads."""
    for part, data, share in _shares(name, train, 1.0):
        views = [
            view for index in range(min(_SAMPLES_TO_COUNT, len(data))) for view in read_sample(part, data, 0, index)
        ]
        tokens, num_learned = sum(len(view.ids) for view in views), sum(sum(view.learned_mask) for view in views)
        yield {
            "data set": part,
            "samples": len(data),
            "an epoch reads": share * len(train),
            "the training": read * share / len(data),
            "tokens": tokens / len(views),
            "learned": num_learned / tokens,
        }


def _shares(name: str, data: Any, share: float) -> Iterator[tuple[str, Any, float]]:
    """Yield (name, data set, share of the samples) for each data set that is read."""
    if isinstance(data, PackedDataset):
        yield from _shares(name, data.documents, share)
    elif isinstance(data, MixtureDataset):
        for part, count in data.epoch_counts.items():
            yield from _shares(part, data.parts[part], share * count / len(data))
    else:
        yield name, data, share


main = command.main_of(COMMAND, __doc__, _add_options, show)

if __name__ == "__main__":
    sys.exit(main())
