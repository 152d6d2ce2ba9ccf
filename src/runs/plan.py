"""From the names on a command line to validated experiments, parents first."""

import contextlib
import json
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from src.errors import ConfigError, RunError, UserError
from src.experiments.config import GROUP_LIST, Places, top_level, unknown
from src.experiments.grid import BrokenGroup, deferred_errors, override, set_path
from src.experiments.identity import check_values, exp_id
from src.experiments.interfaces import RecipeConfig, load_experiment
from src.experiments.registry import canonical_dict, operational_values
from src.runs import parents
from src.runs.checkpoints import checkpoints, retention
from src.runs.context import Options
from src.runs.store import EXP_DICT, RunStore, SavedRun, unknown_run
from src.support.call_once import remember_calls

Experiment = dict[str, Any]
Groups = Mapping[str, Sequence[Experiment]]
_ONE = re.compile(r"(.+)\[(\d{1,9})\]", re.ASCII)
_MISTAKE = re.compile(r"(?P<place>[^\s:]+\[\d+\](?P<path>[.\w\[\]]*))(?P<set>[^:]*): (?P<text>.*)", re.DOTALL)
_PARENT = re.compile(r"experiment ([0-9a-f]{32})")


@dataclass(frozen=True)
class PlannedExperiment:
    """One validated experiment."""

    exp_id: str
    exp: Experiment
    """Canonical: the content of exp_dict.json. Its hash is the id."""
    recipe: RecipeConfig
    groups: tuple[str, ...]
    """The groups that contain it, in order."""
    where: str
    """Its first place, such as "crossattn_tiny[3]", for messages."""
    operational: Mapping[str, Any] = field(default_factory=dict)
    """Operational values by dotted path (`config.operational_field`): in `recipe`, but not in `exp`."""

    @property
    def set_arguments(self) -> list[str]:
        """Arguments for trainval.py that set the operational values of a run that is started by its id."""
        values = [f"{path}={json.dumps(value)}" for path, value in self.operational.items()]
        return ["--set", *values] if values else []

    @property
    def with_operational(self) -> Experiment:
        """`exp` with the operational values: the dict from which `recipe` was made."""
        return override(self.exp, self.operational)

    @property
    def group(self) -> str:
        """The first of its groups; "" if unknown."""
        return self.groups[0] if self.groups else ""


def read_groups() -> Any:
    """EXP_GROUPS of exp_configs.py. A group with an invalid grid is a `BrokenGroup` and does not affect other groups.

    Raises:
        ConfigError: the file raises another error.
    """
    with deferred_errors():
        return top_level("exp_configs", "EXP_GROUPS")


def load(exp: Experiment, group: str, where: str) -> PlannedExperiment:
    """Validate one dict. group: "" if unknown.

    Raises:
        ConfigError: one line for each mistake in it.
    """
    check_values(exp, where)
    recipe = load_experiment(exp, where)
    canonical = canonical_dict(exp, recipe)
    return PlannedExperiment(
        exp_id(canonical), canonical, recipe, (group,) if group else (), where, operational_values(exp, recipe)
    )


def describe_group(experiments: Any, known_items: Mapping[str, PlannedExperiment]) -> str:
    """Recipe, model and data of a group, from the dict of its first experiment: "crossattn: bigcode/starcoder on nq".

    known_items: to look up the name of its parent.
    """
    if isinstance(experiments, BrokenGroup):
        return f"broken: {experiments.error}"
    first = experiments[0] if isinstance(experiments, list) and experiments and isinstance(experiments[0], dict) else {}
    model, data = (part if isinstance(part := first.get(name), dict) else {} for name in ("model", "data"))
    base = model["base"] if isinstance(model.get("base"), dict) else model
    parent = str(base.get("exp_id")) if base.get("name") == "experiment" else ""
    trained = known_items[parent].where if parent in known_items else f"experiment {parent[:8]}" if parent else None
    return (
        f"{first.get('recipe')}: {trained or base.get('path') or base.get('name')} on "
        f"{data.get('corpus') or data.get('name')}"
    )


def replace_micro_batch(item: PlannedExperiment, micro_batch: int | None) -> PlannedExperiment:
    """`item` with a different loop.micro_batch for this start, and the same dict and id. None: `item` itself.

    Raises:
        ConfigError: it does not train, or the sequences of a step are not a multiple of `micro_batch`.
    """
    if micro_batch is None:
        return item
    if not item.exp.get("loop"):
        raise ConfigError("--micro_batch: the experiment has no loop, so nothing is trained. Leave it out.")
    try:
        exp = set_path(item.with_operational, "loop.micro_batch", micro_batch, must_exist=True)
        return replace(item, recipe=load(exp, "", "").recipe)
    except ConfigError as error:
        raise ConfigError(f"--micro_batch {micro_batch}: {str(error).removeprefix('.')}") from None


def load_groups(
    groups: Groups, names: Sequence[str], assignments: Sequence[tuple[str, Any]]
) -> list[PlannedExperiment]:
    """Every experiment of the groups `names`, with the assignments of --set applied.
    "lm[3]" names one experiment of the group "lm".

    Experiments that become equal by assignments are planned once.

    Raises:
        ConfigError: an unknown or empty group, invalid experiments (all mistakes), or two experiments with the same id.
    """
    items: list[PlannedExperiment] = []
    mistakes: list[str] = []
    for text in dict.fromkeys(names):
        name, places = _select(groups, text)
        for i in places:
            where = f"{name}[{i}]"
            try:
                items.append(load(_assign(groups[name][i], assignments, name, where), name, where))
            except ConfigError as error:
                mistakes += str(error).splitlines()
    if mistakes:
        raise ConfigError("\n".join(merge_mistakes(mistakes)))
    return _join_groups(items, bool(assignments))


def load_combinations(
    groups: Groups, names: Sequence[str], combinations: Sequence[Sequence[tuple[str, Any]]]
) -> list[PlannedExperiment]:
    """`load_groups` for each combination of assignments. The places of experiments include values that vary.

    Raises:
        ConfigError: a path is assigned twice, or see `load_groups`.
    """
    paths = [path for path, _ in combinations[0]] if combinations else []
    if twice := [path for path in dict.fromkeys(paths) if paths.count(path) > 1]:
        raise ConfigError(f"--set: {twice[0]} is set twice. Remove one of the values.")
    items_by_id: dict[str, PlannedExperiment] = {}
    for assignments in combinations:
        differs = [
            f" {path}={value}"
            for i, (path, value) in enumerate(assignments)
            if len({str(each[i][1]) for each in combinations}) > 1
        ]
        for item in load_groups(groups, names, assignments):
            items_by_id.setdefault(item.exp_id, replace(item, where=item.where + "".join(differs)))
    return list(items_by_id.values())


def _select(groups: Groups, text: str) -> tuple[str, Sequence[int]]:
    """The group that `text` names, and the indices in it: "lm" all, "lm[3]" one."""
    match = None if text in groups else _ONE.fullmatch(text)
    name = match[1] if match else text
    if name not in groups:
        raise unknown("group", name, groups, "-e", GROUP_LIST)
    group = groups[name]
    if isinstance(group, BrokenGroup):
        raise ConfigError(f"{name}: {group.error}")
    if not isinstance(group, list):
        raise ConfigError(f"{name}: expected a list of experiments, got {type(group).__name__}.")
    if not group:
        raise ConfigError(f"{name}: has no experiments. Add one to its list in exp_configs.py.")
    if match is None:
        return name, range(len(group))
    if int(match[2]) >= len(group):
        raise ConfigError(f"-e {text}: the group has the experiments {name}[0] to {name}[{len(group) - 1}].")
    return name, [int(match[2])]


def _assign(exp: Experiment, assignments: Sequence[tuple[str, Any]], group: str, where: str) -> Experiment:
    """`exp` with the assignments applied. Errors name the group, since a wrong path fails for all its experiments."""
    if assignments:
        check_values(exp, where)
    for path, value in assignments:
        try:
            exp = set_path(exp, path, value, must_exist=False)
        except ConfigError as error:
            raise ConfigError(f"{group}: {error}") from None
    return exp


def load_all(groups: Groups) -> dict[str, PlannedExperiment]:
    """Every valid experiment of `groups` by id."""
    items_by_id: dict[str, PlannedExperiment] = {}
    for name, experiments in groups.items():
        for i, exp in enumerate(
            experiments if isinstance(experiments, list) and not isinstance(experiments, BrokenGroup) else []
        ):
            with contextlib.suppress(ConfigError):
                item = load(exp, name, f"{name}[{i}]")
                items_by_id.setdefault(item.exp_id, item)
    return items_by_id


def _join_groups(planned_items: list[PlannedExperiment], made_equal: bool) -> list[PlannedExperiment]:
    """Each id once, with all groups that contain it. made_equal: allow duplicates within a group."""
    places: dict[str, list[PlannedExperiment]] = {}
    for item in planned_items:
        equal_items = places.setdefault(item.exp_id, [])
        for other in equal_items:
            if other.exp != item.exp:
                raise ConfigError(
                    f"{item.where} and {other.where} differ but share the id {item.exp_id}. "
                    "Change a string in one of them."
                )
            if other.groups == item.groups and not made_equal:
                raise ConfigError(f"{item.where} is the same experiment as {other.where}. Remove one of them.")
        equal_items.append(item)
    return [
        replace(same_id[0], groups=tuple(dict.fromkeys(item.group for item in same_id))) for same_id in places.values()
    ]


def find(prefix: str, known_items: Mapping[str, PlannedExperiment], runs: Path) -> PlannedExperiment:
    """The experiment with an id that starts with `prefix`, from exp_configs.py or its save directory,
    with the groups recorded there.

    Raises:
        ConfigError: there is no such experiment, or several.
        RunError: the dict in the save directory is damaged, or has another id.
    """
    ids = {name for name in known_items if name.startswith(prefix)}
    ids |= set(RunStore(runs).ids(prefix))
    if prefix not in ids and len(ids) > 1:
        raise unknown_run(f"--exp_id {prefix}", prefix, runs, ids)
    prefix = prefix if prefix in ids or not ids else ids.pop()
    run = SavedRun(runs / prefix)
    file = run.path / EXP_DICT
    if prefix in known_items:
        item = known_items[prefix]
    elif file.exists():
        item = load(run.exp, "", str(file))
        if item.exp_id != prefix:
            raise RunError(f"{file}: its canonical id is {item.exp_id}, not {prefix}. Train that one with -e.")
    else:
        raise unknown_run(f"--exp_id {prefix}", prefix, runs, also="not in exp_configs.py")
    return replace(item, groups=tuple(run.groups) or item.groups)


def add_parents(
    selected: Sequence[PlannedExperiment], known_items: Mapping[str, PlannedExperiment], add: bool
) -> list[PlannedExperiment]:
    """`selected` with parents before children. add: also their ancestors in `known_items`."""
    selected_items = {item.exp_id: item for item in selected}
    everything = {**known_items, **selected_items}
    ordered_ids = parents.order(
        {i: p.exp for i, p in selected_items.items()}, {i: p.exp for i, p in known_items.items()}, add
    )
    return [everything[name] for name in ordered_ids]


@remember_calls()
def find_problems(  # noqa: PLR0913, PLR0917
    items: Sequence[PlannedExperiment],
    places: Places,
    reset: Container[str] = (),
    ahead: Collection[str] = (),
    micro_batch: int | None = None,
    here: bool = False,
    store: RunStore | None = None,
) -> dict[str, list[str]]:
    """Error messages for each experiment, by id. Loads no model.

    reset: ids that start over. Other finished experiments are not checked.
    ahead: ids of jobs that end before these; they, and earlier `items`, do not count as missing parents.
    micro_batch: see `replace_micro_batch`.
    here: whether they will run on this machine, so that its devices are checked.
    store: cache of `places.runs`.
    """
    problems: dict[str, list[str]] = {}
    before = set(ahead)
    store = RunStore(places.runs) if store is None else store
    for item in items:
        messages: list[str] = []
        try:
            if item.exp_id not in reset and store[item.exp_id].state == "done":
                continue
        except UserError as error:
            messages.append(str(error))
        messages += parents.missing_parents(item.exp, places, before, store)
        try:
            replace_micro_batch(item, micro_batch).recipe.check(places)
            if here:
                item.recipe.check_device()
        except UserError as error:
            messages.append(str(error))
        if messages:
            problems[item.exp_id] = [f"{item.where}: {line}" for message in messages for line in message.splitlines()]
        before.add(item.exp_id)
    return problems


def find_unkept_steps(
    items: Sequence[PlannedExperiment],
    places: Places,
    store: RunStore,
    options: Options,
    reset: Container[str] = (),
) -> dict[str, list[str]]:
    """Messages, by id, for experiments that continue a training of the same command whose rule deletes the checkpoint.

    items: in the order of their training. options: those of the command. reset: ids that start over.
    """
    recipes: dict[str, Any] = {}
    problems: dict[str, list[str]] = {}
    for item in items:
        model: Any = getattr(item.recipe, "model", None)
        parent, step = recipes.get(getattr(model, "exp_id", "")), getattr(model, "step", None)
        is_done = item.exp_id not in reset and store[item.exp_id].state_or_damage == "done"
        if parent and step and not is_done:
            with contextlib.suppress(UserError):  # a problem of the parent
                run = places.runs / model.exp_id
                is_saved = model.exp_id not in reset and checkpoints.folder(run, step).exists()
                if is_saved and step in retention.read_continued(run):
                    continue
                if text := _deletion_reason(parent.with_steps(places).loop, step, options, is_saved):
                    where = f"{item.where}.model.step: {step}: parent {model.exp_id}, trained by this command,"
                    problems[item.exp_id] = [f"{where} {text}"]
        if not is_done and getattr(item.recipe, "loop", None):
            recipes[item.exp_id] = item.recipe
    return problems


def _deletion_reason(loop: Any, step: int, options: Options, is_saved: bool) -> str:
    """Why a training does not keep its checkpoint of `step`, apart from the best one, or "". is_saved: whether an
    earlier start has written it."""
    periodic = {at for every in options.save_intervals(loop.eval_every) for at in range(every, loop.steps + 1, every)}
    saved = sorted({*periodic, *loop.extra_eval_steps, loop.steps} | ({step} if is_saved else set[int]()))
    if step not in saved:
        return f"has checkpoints of steps {_list(saved)}. Use one of them, or add --save_every."
    every = options.keep.every
    remaining = [each for each in saved if each in saved[-options.keep.last :] or (every and each % every == 0)]
    return (
        ""
        if step in remaining
        else f"keeps only those of steps {_list(remaining)}. Add --keep_every, with a divisor of it."
    )


def _list(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:10])) + (f" and {len(steps) - 10} more" if len(steps) > 10 else "")


def merge_problems(problems: Mapping[str, Sequence[str]], known_items: Mapping[str, PlannedExperiment]) -> list[str]:
    """The messages of `find_problems`, without duplicates, with the places of parents in `known_items`."""

    def name(match: re.Match[str]) -> str:
        return f"{known_items[match[1]].where} ({match[1]})" if match[1] in known_items else match[0]

    return [
        _PARENT.sub(name, line)
        for line in merge_mistakes(message for messages in problems.values() for message in messages)
    ]


def merge_mistakes(lines: Iterable[str]) -> list[str]:
    """Merge lines with the same cause: "lm[0].model and 7 more: unknown key 'stride'"."""
    places: dict[tuple[str, str], list[str]] = {}
    for line in dict.fromkeys(lines):
        match = _MISTAKE.fullmatch(line)
        key, place = ((match["path"], match["text"]), match["place"] + match["set"]) if match else (("", line), "")
        places.setdefault(key, []).append(place)
    return [
        f"{matches[0]}{f' and {len(matches) - 1} more' * (len(matches) > 1)}: {text}" if matches[0] else text
        for (_, text), matches in places.items()
    ]
