"""Ancestry from save directories: who starts from whom, and what is wrong with a parent."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.experiments.interfaces import RecipeConfig
from src.files import new_directory, write_json
from src.runs.checkpoints import checkpoints
from src.runs.plan import PlannedExperiment
from src.runs.run_dir import RunDir
from src.tables import lineage
from src.tables.lineage import Edge, Lineage


class NoRecipe(RecipeConfig):
    """Nothing to check, nothing to run."""

    def checks(self, places: Places) -> list[Callable[[], object]]:
        return []

    def run(self, run: Any) -> None:
        raise AssertionError


def child_of(*parents: dict[str, Any], seed: int = 0, which: str = "last") -> dict[str, Any]:
    bases = [{"name": "experiment", "exp_id": exp_id(parent), "checkpoint": which} for parent in parents]
    return {"recipe": "lm", "seed": seed, "model": {"name": "wrapper", "bases": bases}}


OLD = {"recipe": "pretrain", "seed": 0}
MIDDLE = child_of(OLD)
YOUNG = child_of(MIDDLE, OLD)
OTHER = {"recipe": "lm", "seed": 7}


def make(runs: Path, exp: dict[str, Any], group: str = "g", state: str = "done", reason: str | None = None) -> str:
    """A run with one step, its checkpoint, and a score."""
    with RunDir.open(runs, exp, exp, facts={"groups": [group]}) as run:
        with new_directory(checkpoints.folder(run.path, 1)) as folder:
            write_json(folder / "model.json", exp.get("model", {}))
        run.scores.append({"step": 1, "val_loss": 0.5, "grad_norm": 3.0})
        run.set_status(state, step=1, **({"reason": reason} if reason else {}))  # type: ignore[arg-type]
    return run.exp_id


def states(graph: Lineage) -> dict[str, str]:
    return {name: node.state for name, node in graph.nodes.items()}


def test_ancestry_of_three_generations(tmp_path: Path):
    old, middle, young = make(tmp_path, OLD, "first"), make(tmp_path, MIDDLE, "second"), make(tmp_path, YOUNG, "third")
    graph = lineage.build(tmp_path)
    assert set(graph.edges) == {Edge(middle, old, "last"), Edge(young, middle, "last"), Edge(young, old, "last")}
    assert [edge.parent for edge in graph.parents(young)] == [middle, old]
    assert {edge.child for edge in graph.children(old)} == {middle, young}
    assert (graph.problems, graph.warnings) == ((), ())
    node = graph.nodes[middle]
    assert (node.state, node.group, node.recipe, node.step, node.scores, node.reason) == (
        "done",
        "second",
        "lm",
        1,
        {"val_loss": 0.5},
        "",
    )


def test_the_checkpoint_of_the_parent_is_shown(tmp_path: Path):
    old = make(tmp_path, OLD)
    child = make(tmp_path, child_of(OLD, which="best"))
    graph = lineage.build(tmp_path)
    continuation = make(tmp_path, {"recipe": "lm", "model": {"name": "experiment", "exp_id": old, "step": 1}})
    assert lineage.build(tmp_path).parents(continuation) == [Edge(continuation, old, "step 1")]
    assert graph.edges == (Edge(child, old, "best"),)
    (problem,) = graph.problems
    assert problem.startswith(
        f"{child}: it starts from experiment {old}, which cannot be used: {tmp_path / old}: has no best checkpoint"
    )


def test_a_missing_and_a_failed_parent_are_named(tmp_path: Path):
    middle = make(tmp_path, MIDDLE, state="failed", reason="out of memory")
    young = make(tmp_path, YOUNG, state="stopped")
    graph = lineage.build(tmp_path)
    assert states(graph) == {middle: "failed", young: "stopped", exp_id(OLD): "missing"}
    assert graph.nodes[middle].reason == "out of memory"
    assert graph.nodes[exp_id(OLD)].reason == f"no directory in {tmp_path}"
    problems = sorted(graph.problems)
    assert len(problems) == 3
    assert any(
        line.startswith(f"{young}: it starts from experiment {middle}, which is failed, not done") for line in problems
    )
    assert any(
        line.startswith(f"{middle}: it starts from experiment {exp_id(OLD)}, which is neither in exp_configs.py")
        for line in problems
    )


@pytest.mark.parametrize("file", ["exp_dict.json", "status.json"])
def test_a_damaged_directory_is_named_and_skipped(tmp_path: Path, file: str):
    old, middle, other = make(tmp_path, OLD), make(tmp_path, MIDDLE), make(tmp_path, OTHER)
    for damaged_exp in (old, other):
        (tmp_path / damaged_exp / file).write_text("{")
    graph = lineage.build(tmp_path)
    assert states(graph) == {middle: "done", old: "damaged"}
    assert len(graph.warnings) == 2
    assert f"{old}/{file}:1: not valid JSON" in graph.nodes[old].reason
    assert [f"{old}, which cannot be used" in problem for problem in graph.problems] == (
        [True] if file == "status.json" else []
    )


def test_planned_experiments_are_new_and_not_missing(tmp_path: Path):
    part = NoRecipe()
    planned_items = {
        exp_id(e): PlannedExperiment(exp_id(e), e, part, ("g",), f"g[{i}]") for i, e in enumerate((OLD, MIDDLE, YOUNG))
    }
    make(tmp_path, MIDDLE, state="failed")
    graph = lineage.build(tmp_path, planned_items)
    assert states(graph) == {exp_id(MIDDLE): "failed", exp_id(OLD): "new", exp_id(YOUNG): "new"}
    assert (graph.nodes[exp_id(YOUNG)].recipe, graph.nodes[exp_id(YOUNG)].group) == ("lm", "g")
    assert [edge.parent for edge in graph.parents(exp_id(YOUNG))] == [exp_id(MIDDLE), exp_id(OLD)]
    assert any("has not been run" in problem and "--with-parents" in problem for problem in graph.problems)
    shutil.rmtree(tmp_path / exp_id(MIDDLE))
    assert set(states(lineage.build(tmp_path / "nowhere", planned_items)).values()) == {"new"}


def test_a_family_has_ancestors_and_descendants(tmp_path: Path):
    names = [make(tmp_path, exp) for exp in (OLD, MIDDLE, YOUNG, OTHER, child_of(OLD, seed=3))]
    old, middle, young, other, sister = names
    make(tmp_path, child_of({"recipe": "lm", "seed": 99}))
    graph = lineage.build(tmp_path)
    assert set(graph.family([middle]).nodes) == {old, middle, young}
    assert set(graph.family([sister]).nodes) == {old, sister}
    assert set(graph.family([other]).nodes) == {other}
    assert len(graph.problems) == 1
    assert graph.family([middle]).problems == ()
    assert graph.family([middle]).edges == tuple(e for e in graph.edges if e.child in (middle, young))


def test_a_group_brings_its_ancestors(tmp_path: Path):
    old, middle, _ = make(tmp_path, OLD, "first"), make(tmp_path, MIDDLE, "second"), make(tmp_path, OTHER, "apart")
    graph = lineage.build(tmp_path)
    assert set(lineage.group_family(tmp_path, graph, "second").nodes) == {old, middle}
    with pytest.raises(ConfigError, match=r"unknown group 'secnd'\. Did you mean 'second'\?"):
        lineage.group_family(tmp_path, graph, "secnd")


def test_a_unique_prefix_of_an_id_is_enough(tmp_path: Path):
    ids = [
        make(tmp_path, {"recipe": "lm", "seed": seed}) for seed in range(17)
    ]  # two of 17 begin with the same of 16 characters
    graph = lineage.build(tmp_path)
    assert graph.find(ids[0][:12], tmp_path) == ids[0]
    with pytest.raises(ConfigError, match="--exp_id : 17 ids start with it"):
        graph.find("", tmp_path)
    with pytest.raises(ConfigError, match=rf"--exp_id zz: .* in {tmp_path} .*{ids[-1]}"):
        graph.find("zz", tmp_path)


def test_an_empty_folder_is_said(tmp_path: Path):
    with pytest.raises(DataError, match="no runs in this folder"):
        lineage.build(tmp_path)


def test_a_long_chain(tmp_path: Path):
    """No recursion: a thousand generations are as good as three."""
    part = NoRecipe()
    planned_items, exp = {}, OLD
    for _ in range(1500):
        planned_items[exp_id(exp)] = PlannedExperiment(exp_id(exp), exp, part, (), "")
        exp = child_of(exp)
    graph = lineage.build(tmp_path, planned_items)
    assert len(graph.family([exp_id(OLD)]).nodes) == 1500
