"""Plans: which experiments a command line names, and the groups that asked for each."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from src.errors import ConfigError, RunError
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.launch.status import select_runs
from src.runs import plan
from src.runs.store import SavedRun, expand_run

pytestmark = pytest.mark.usefixtures("toy_recipe")

ONE = {"recipe": "toy", "seed": 1}
TWO = {"recipe": "toy", "seed": 2}


def saved(runs: Path, exp: dict, name: str) -> Path:
    (runs / name).mkdir(parents=True)
    (runs / name / "exp_dict.json").write_text(json.dumps(exp))
    return runs / name


def test_an_experiment_of_several_groups_is_planned_once_for_all_of_them():
    groups = {"a": [ONE, TWO], "b": [TWO], "c": [TWO]}
    items = plan.load_groups(groups, ["a", "b"], [])
    assert [(item.exp, item.groups, item.where) for item in items] == [
        (ONE, ("a",), "a[0]"),
        (TWO, ("a", "b"), "a[1]"),
    ]


def test_a_group_named_twice_is_one_group():
    assert [item.groups for item in plan.load_groups({"a": [ONE]}, ["a", "a"], [])] == [("a",)]


def test_a_duplicate_experiment_in_a_later_group_is_refused():
    with pytest.raises(ConfigError, match=r"^b\[1\] is the same experiment as b\[0\]\. Remove one of them"):
        plan.load_groups({"a": [ONE], "b": [ONE, dict(ONE)]}, ["a", "b"], [])


def test_an_empty_group_is_refused_where_it_is_named():
    assert plan.load_groups({"g": [], "a": [ONE]}, ["a"], [])
    with pytest.raises(ConfigError, match=r"^g: has no experiments\. "):
        plan.load_groups({"g": [], "a": [ONE]}, ["a", "g"], [])


def test_one_experiment_of_a_group_is_named_by_its_place():
    groups = {"a": [ONE, TWO], "a[7]": [TWO]}
    assert [(item.where, item.group) for item in plan.load_groups(groups, ["a[1]"], [])] == [("a[1]", "a")]
    assert [item.where for item in plan.load_groups(groups, ["a[7]"], [])] == ["a[7][0]"], "a group may be called so"
    with pytest.raises(ConfigError, match=r"^-e a\[2\]: the group has the experiments a\[0\] to a\[1\]\.$"):
        plan.load_groups(groups, ["a[2]"], [])
    with pytest.raises(ConfigError, match=r"^-e: unknown group 'b'"):
        plan.load_groups(groups, ["b[0]"], [])


def test_an_experiment_looked_up_by_id_has_the_groups_in_its_directory(tmp_path: Path):
    items = plan.load_all({"a": [ONE], "b": [ONE]})
    assert plan.find(exp_id(ONE), items, tmp_path).groups == ("a",)
    run = saved(tmp_path, ONE, exp_id(ONE))
    assert plan.find(exp_id(ONE), {}, tmp_path).groups == ()
    SavedRun(run).join_groups(["c", "b"])
    assert plan.find(exp_id(ONE), {}, tmp_path).groups == ("c", "b")
    assert plan.find(exp_id(ONE), items, tmp_path).groups == ("c", "b")
    with pytest.raises(
        ConfigError, match=rf"^--exp_id 0{{32}}: not in exp_configs\.py.* in {re.escape(str(tmp_path))} "
    ):
        plan.find("0" * 32, items, tmp_path)


def test_a_unique_prefix_of_an_id_is_enough(tmp_path: Path):
    items = {item.exp_id: item for item in (plan.load({**ONE, "seed": seed}, "a", f"a[{seed}]") for seed in range(40))}
    for full_id in items:
        length = next(n for n in range(1, 33) if sum(other.startswith(full_id[:n]) for other in items) == 1)
        assert plan.find(full_id[:length], items, tmp_path).exp_id == full_id
    run = saved(tmp_path, ONE, exp_id(ONE))
    assert plan.find(exp_id(ONE)[:6], {}, tmp_path).exp_id == run.name
    with pytest.raises(ConfigError, match=r"^--exp_id : 40 ids start with it: (\w{32}, ){3}\.\.\."):
        plan.find("", items, tmp_path / "none")


def test_equal_causes_are_one_line():
    lacks = {"a": ["g[0]: data: gone.", "g[0]: model: gone."], "b": ["g[1]: data: gone."], "c": ["h[0]: data: gone."]}
    assert plan.merge_problems(lacks, {}) == ["g[0] and 2 more: data: gone.", "g[0]: model: gone."]
    groups = {"a": [{**ONE, "sed": 1}, {**TWO, "sed": 1}, {**TWO, "seed": "x"}]}
    with pytest.raises(ConfigError) as error_info:
        plan.load_groups(groups, ["a"], [])
    first, second = str(error_info.value).splitlines()
    assert re.match(r"a\[0\] and 1 more: unknown key 'sed'\. Did you mean 'seed'", first)
    assert second.startswith("a[2].seed: expected int")


def test_a_missing_parent_is_named_by_its_place():
    parent = plan.load(ONE, "base", "base[0]")
    lacks = {
        "a": [f"g[0]: it starts from experiment {parent.exp_id}, which is lost."],
        "b": [f"g[1]: experiment {'0' * 32} is gone."],
    }
    assert plan.merge_problems(lacks, {parent.exp_id: parent}) == [
        f"g[0]: it starts from base[0] ({parent.exp_id}), which is lost.",
        f"g[1]: experiment {'0' * 32} is gone.",
    ]


def test_experiments_that_assignments_make_equal_are_planned_once():
    (item,) = plan.load_groups({"a": [ONE, TWO]}, ["a"], [("seed", 7)])
    assert (item.where, item.groups, item.exp["seed"]) == ("a[0]", ("a",), 7)
    items = plan.load_combinations({"a": [ONE, TWO]}, ["a"], [[("seed", 7)], [("seed", 8)]])
    assert [each.where for each in items] == ["a[0] seed=7", "a[0] seed=8"]


def test_a_dict_that_was_edited_is_not_trained_under_its_old_id(tmp_path: Path):
    run = saved(tmp_path, TWO, exp_id(ONE))
    with pytest.raises(
        RunError, match=rf"{run}/exp_dict\.json: its id is {exp_id(TWO)}, not the name of its directory"
    ):
        plan.find(exp_id(ONE), {}, tmp_path)


def test_a_dict_with_another_canonical_form_is_not_trained_under_another_id(tmp_path: Path):
    old = {**ONE, "rate": 1}  # a directory from before the field was a float
    run = saved(tmp_path, old, exp_id(old))
    new = exp_id({**ONE, "rate": 1.0})
    with pytest.raises(RunError, match=rf"{run}/exp_dict\.json: its canonical id is {new}, not {exp_id(old)}"):
        plan.find(exp_id(old), {}, tmp_path)


@pytest.mark.parametrize("entry", [None, "x", [1]])
@pytest.mark.parametrize("assignments", [[], [("seed", 2)]])
def test_an_entry_that_is_no_dict_is_named(entry: object, assignments: list):
    with pytest.raises(ConfigError, match=r"^a\[1\]: expected a dict, got "):
        plan.load_groups({"a": [ONE, entry]}, ["a"], assignments)  # type: ignore[list-item]


def test_an_unknown_group_among_names_of_several_types():
    with pytest.raises(ConfigError, match=r"^-e: unknown group 'b'\..* Known: 1, a\.$"):
        plan.load_groups({"a": [ONE], 1: [ONE]}, ["b"], [])  # type: ignore[dict-item]


def test_an_assignment_that_fits_nowhere_is_reported_once_per_group():
    with pytest.raises(ConfigError) as error_info:
        plan.load_groups({"a": [ONE, TWO], "b": [ONE]}, ["a", "b"], [("lop.steps", 3)])
    assert str(error_info.value).splitlines() == [
        f"{g}: lop.steps: unknown key 'lop'. Known: rate, seed." for g in "ab"
    ]


def child_of(identity: str) -> dict:
    return {"recipe": "toy", "seed": 9, "base": {"name": "experiment", "exp_id": identity}}


def item(exp: dict) -> plan.PlannedExperiment:
    return plan.PlannedExperiment(exp_id(exp), exp, plan.load(ONE, "", "x").recipe, ("g",), f"g[{exp['seed']}]")


def test_a_damaged_status_is_reported_and_the_remaining_experiments_are_checked(tmp_path: Path):
    run = saved(tmp_path, ONE, exp_id(ONE))
    (run / "status.json").write_text("{")
    places = Places(data=tmp_path, runs=tmp_path)
    orphan = child_of("c" * 32)
    heir = {**child_of(exp_id(ONE)), "seed": 8}
    problems = plan.find_problems([item(heir), item(ONE), item(orphan)], places)
    assert list(problems) == [exp_id(heir), exp_id(ONE), exp_id(orphan)]
    assert "status.json" in problems[exp_id(heir)][0]
    assert problems[exp_id(ONE)][0].startswith(f"g[1]: {run}/status.json")
    assert plan.find_problems([item(ONE)], places, {exp_id(ONE)}) == {}


def test_a_finished_experiment_has_no_problems_unless_it_starts_over(tmp_path: Path):
    orphan = child_of("c" * 32)
    (saved(tmp_path, orphan, exp_id(orphan)) / "status.json").write_text('{"state": "done"}')
    places = Places(data=tmp_path, runs=tmp_path)
    assert plan.find_problems([item(orphan)], places) == {}
    assert list(plan.find_problems([item(orphan)], places, {exp_id(orphan)})) == [exp_id(orphan)]


def test_a_parent_that_is_done_is_not_trained_again_so_its_checkpoint_must_be_there(tmp_path: Path):
    (saved(tmp_path, ONE, exp_id(ONE)) / "status.json").write_text('{"state": "done", "step": 4}')
    places, heir = Places(data=tmp_path, runs=tmp_path), child_of(exp_id(ONE))
    (message,) = plan.find_problems([item(ONE), item(heir)], places)[exp_id(heir)]
    assert "step-00000004: the last checkpoint is missing" in message
    assert plan.find_problems([item(ONE), item(heir)], places, {exp_id(ONE)}) == {}


def test_a_path_is_set_once():
    with pytest.raises(ConfigError, match=r"loop\.steps"):
        plan.load_combinations({"a": [ONE]}, ["a"], [[("loop.steps", 1), ("seed", 1), ("loop.steps", 2)]])


def test_several_values_of_an_assignment_make_several_experiments():
    items = plan.load_combinations({"a": [ONE]}, ["a"], [[("seed", 1)], [("seed", 2)]])
    assert [(item.exp, item.where) for item in items] == [(ONE, "a[0] seed=1"), (TWO, "a[0] seed=2")]
    assert [item.where for item in plan.load_combinations({"a": [ONE]}, ["a"], [[("seed", 2)]])] == ["a[0]"]


def test_a_group_with_a_refused_grid_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = f"""from src.experiments.grid import grid
EXP_GROUPS = {{}}
EXP_GROUPS["broken"] = grid({ONE!r}, {{"sed": [1]}})
EXP_GROUPS["whole"] = grid({ONE!r}, {{"seed": [1, 2]}})
"""
    (tmp_path / "exp_configs.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "exp_configs", raising=False)
    try:
        groups = plan.read_groups()
    finally:
        sys.modules.pop("exp_configs", None)
    assert len(plan.load_groups(groups, ["whole"], [])) == len(plan.load_all(groups)) == 2
    place = re.escape(f"{tmp_path / 'exp_configs.py'}:3: sed: unknown key 'sed'")
    with pytest.raises(ConfigError, match=f"^broken: {place}"):
        plan.load_groups(groups, ["broken"], [])
    assert re.match(f"broken: {place}", plan.describe_group(groups["broken"], {}))


def test_a_run_is_found_by_a_prefix_of_its_id(tmp_path: Path):
    first, second = saved(tmp_path, ONE, "abc1" + "0" * 28), saved(tmp_path, TWO, "abd2" + "0" * 28)
    assert expand_run(tmp_path / "abc") == expand_run(Path("abc"), tmp_path) == expand_run(first) == first
    with pytest.raises(ConfigError, match=f"ab: 2 ids start with it: {first.name}, {second.name}"):
        expand_run(tmp_path / "ab")
    assert select_runs(tmp_path / "abd") == (tmp_path, [second.name])


def test_an_unknown_run_names_the_newest_runs_and_their_folder(tmp_path: Path):
    with pytest.raises(ConfigError, match="It has no runs"):
        expand_run(Path("fff"), tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        expand_run(Path("fff"), tmp_path / "nowhere")
    runs = [saved(tmp_path, ONE, f"{n}" * 32) for n in (3, 1, 5, 2)]
    for age, run in enumerate(runs):
        os.utime(run / "exp_dict.json", (1000 - age, 1000 - age))
    for path in (Path("fff"), tmp_path / "fff", Path("talks_model")):
        with pytest.raises(ConfigError) as error:
            expand_run(path, tmp_path)
        message = str(error.value)
        assert message.startswith(f"{path}: ")
        assert f"no run in {tmp_path} " in message
        assert f": {', '.join(run.name for run in runs[:3])};" in message
        assert runs[3].name not in message


def test_an_unknown_group_of_many_names_the_command_that_lists_them():
    with pytest.raises(ConfigError, match=r"^-e: unknown group 'zzz'\. Known: 41, see `python trainval\.py --list`\.$"):
        plan.load_groups({f"group_{n}": [ONE] for n in range(41)}, ["zzz"], [])
