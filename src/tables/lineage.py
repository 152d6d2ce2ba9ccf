"""Ancestry in a folder of runs: parents and children of experiments, and parents that are missing or failed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from src.errors import DataError, UserError
from src.experiments.config import Places
from src.runs.history import branches
from src.runs.parents import describe, missing_parents, parent_checkpoints
from src.runs.plan import PlannedExperiment
from src.runs.store import RunStore, SavedRun, unknown_run
from src.tables import results


@dataclass(frozen=True)
class Node:
    """One experiment."""

    exp_id: str
    state: str
    """`SavedRun.state`, or "haven": written by haven; "missing": known only as a parent; "damaged": unreadable."""
    group: str = ""
    recipe: str = ""
    step: int | None = None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """The last value of each headline score; None for NaN or infinity."""
    reason: str = ""
    """Why the run failed, stopped, is missing or damaged, if known."""
    branches: tuple[tuple[int, int], ...] = ()
    """(number, step) of each branch after a rewind, the oldest first."""


@dataclass(frozen=True)
class Edge:
    """`child` starts from the checkpoint ("last", "best" or "step N") of `parent`. Both are ids."""

    child: str
    parent: str
    checkpoint: str


@dataclass(frozen=True)
class Lineage:
    """Experiments by id, and their parents.
    There are no cycles: an id is the hash of a dict that contains the ids of its parents."""

    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...]
    problems: tuple[str, ...] = ()
    """One line for each parent without a usable checkpoint."""
    warnings: tuple[str, ...] = ()
    """One line for each directory that was skipped."""

    def parents(self, exp_id: str) -> list[Edge]:
        """The edges from `exp_id` to its parents, in the order of its dict."""
        return [edge for *_, edge in self._graph.in_edges(exp_id, data="edge")]

    def children(self, exp_id: str) -> list[Edge]:
        """The edges from the children of `exp_id`."""
        return [edge for *_, edge in self._graph.out_edges(exp_id, data="edge")]

    def find(self, prefix: str, runs: Path) -> str:
        """The only id that starts with `prefix`. runs: the folder of the runs, for the error.

        Raises:
            ConfigError: no id does, or several do.
        """
        matches = [name for name in self.nodes if name.startswith(prefix)]
        if len(matches) != 1:
            raise unknown_run(f"--exp_id {prefix}", prefix, runs, matches, "no parent of a run")
        return matches[0]

    def family(self, members: Iterable[str]) -> "Lineage":
        """`members` with all ancestors and descendants, and their problems.
        Unknown ids, such as those of damaged runs, are skipped."""
        import networkx

        members = [name for name in members if name in self.nodes]
        directions = (self._graph, self._graph.reverse(copy=False))
        remaining = {name for graph in directions for layer in networkx.bfs_layers(graph, members) for name in layer}
        return Lineage(
            {name: node for name, node in self.nodes.items() if name in remaining},
            tuple(edge for edge in self.edges if edge.child in remaining and edge.parent in remaining),
            tuple(line for line in self.problems if line.split(":")[0] in remaining),
            self.warnings,
        )

    @cached_property
    def _graph(self) -> Any:
        """The networkx.MultiDiGraph of the ids, each `Edge` leading from the parent to the child."""
        import networkx

        graph = networkx.MultiDiGraph()
        graph.add_nodes_from(self.nodes)
        graph.add_edges_from((edge.parent, edge.child, {"edge": edge}) for edge in self.edges)
        return graph


def build(runs: Path, planned_items: Mapping[str, PlannedExperiment] | None = None) -> Lineage:
    """The ancestry of every experiment that has a save directory in `runs` or is in `planned_items`.

    planned_items: experiments of exp_configs.py by id; those without a directory are "new" instead of "missing".

    Raises:
        DataError: there are no runs and no planned experiments.
    """
    planned_items = planned_items or {}
    rows, warnings = _rows(runs, bool(planned_items))
    nodes: dict[str, Node] = {}
    dicts: dict[str, dict[str, Any]] = {}
    for row in rows:
        try:
            dicts[row["exp_id"]] = {} if row["state"] == "foreign" else SavedRun(runs / row["exp_id"]).exp
            nodes[row["exp_id"]] = _node(runs, row)
        except UserError as error:  # damaged or removed since its row was read
            warnings.append(f"skipped: {error}")
            dicts.pop(row["exp_id"], None)
    for name, item in planned_items.items():
        if name not in nodes and not (runs / name / "exp_dict.json").exists():
            nodes[name] = Node(name, "new", item.group, str(item.exp.get("recipe", "")))
            dicts[name] = item.exp
    parents = [(name, *checkpoint) for name, exp in dicts.items() for checkpoint in parent_checkpoints(exp)]
    edges = [Edge(name, parent, describe(which)) for name, parent, which in parents]
    for parent in dict.fromkeys(edge.parent for edge in edges if edge.parent not in nodes):
        nodes[parent] = _absent_node(runs, parent, warnings)
    return Lineage(nodes, tuple(edges), tuple(_problems(runs, dicts, planned_items)), tuple(warnings))


def group_family(runs: Path, lineage: Lineage, group: str) -> Lineage:
    """The family of the runs of `group`.

    Raises:
        ConfigError: `group` has no run.
    """
    names = {node.exp_id for node in lineage.nodes.values() if node.group == group}
    try:
        names |= {row["exp_id"] for row in results.load_rows(runs, group)[0]}
    except UserError:
        if not names:
            raise
    return lineage.family(name for name in lineage.nodes if name in names)


def _rows(runs: Path, may_be_empty: bool) -> tuple[list[results.Row], list[str]]:
    try:
        return results.load_rows(runs)
    except DataError:
        if not may_be_empty:
            raise
        return [], []


def _node(runs: Path, row: results.Row) -> Node:
    recipe = row.get("recipe", "")
    scores = {name: row[name] for name in results.headline_scores(row.scores)}
    reason = "" if row["state"] in results.FINISHED else str(SavedRun(runs / row["exp_id"]).status.get("reason", ""))
    reason = row.contact or reason
    chain = tuple((branch.number, branch.from_step) for branch in branches.read(runs / row["exp_id"]))
    return Node(row["exp_id"], row["state"], row["group"], str(recipe), row["step"], scores, reason, chain)


def _absent_node(runs: Path, parent: str, warnings: Iterable[str]) -> Node:
    """The node of a parent without a row: no directory, or one that cannot be read."""
    if not (runs / parent).exists():
        return Node(parent, "missing", reason=f"no directory in {runs}")
    return Node(
        parent, "damaged", reason=next((text for text in warnings if parent in text), f"{runs / parent} cannot be read")
    )


def _problems(
    runs: Path, dicts: Mapping[str, dict[str, Any]], planned_items: Mapping[str, PlannedExperiment]
) -> list[str]:
    places = Places(data=runs, runs=runs, experiments={name: item.exp for name, item in planned_items.items()})
    store = RunStore(runs)
    return [f"{name}: {text}" for name, exp in dicts.items() for text in missing_parents(exp, places, store=store)]
