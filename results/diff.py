"""Compare two experiments: config, code, environment, data and scores: `python -m results.diff RUN RUN`."""

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from src.errors import RunError, UserError, print_errors
from src.experiments.config import flatten
from src.files import read_json, reading
from src.operations import recorded_code
from src.runs.scores import SCORES
from src.runs.store import CONFIG, DIFF, SavedRun
from src.runs.summary import summarize
from src.support import documents
from src.support.command_line import make_parser
from src.tables import run_arguments
from src.tables.comparability import training_inputs

MAX_LINES = 40
"""Maximum number of lines of a patch in the text output."""
_CODE = ("commit", "branch", "dirty")
_IGNORED = {"attempt", "groups", "pid", "time", *_CODE}
Values = dict[str, Any]
Difference = dict[str, dict[str, Any]]
"""Key -> {"a": value, "b": value}; a side is missing if its experiment does not have the key."""


class Document(documents.Document):
    """Differences of two runs; no section is equal in both."""

    schema: Literal["results.diff/1"]
    a: str
    """Id of the first run."""
    b: str
    sections: dict[str, Difference]
    """Of experiment, config, code, environment, data, status and scores: {key: {"a": value, "b": value}}."""
    code_patch: list[str] | None
    """Lines of the patch from the code of `a` to that of `b`; None if a commit is not in this repository."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences. Returns the exit code, 0 even if there are some."""
    options = run_arguments.parse(_parser(), arguments)
    runs = run_arguments.paths(options, at_least=2, at_most=2)
    differing, warnings = differences(*runs)
    run_arguments.warn(warnings)
    names = {"a": runs[0].name, "b": runs[1].name}
    patch = code_difference(*runs)
    content = {**names, "sections": differing, "code_patch": patch}
    run_arguments.show(options.output, "results.diff/1", content, lambda: print(_text(names, differing, patch)))
    return 0


def code_difference(one: Path, other: Path) -> list[str] | None:
    """The lines of the patch between the code of two runs; None if it is unknown."""
    try:
        return recorded_code.difference(SavedRun(one), SavedRun(other))
    except UserError:  # such as a run of another repository
        return None


def differences(one: Path, other: Path) -> tuple[dict[str, Difference], list[str]]:
    """The differing values of two save directories by section, and a warning for each file that cannot be read."""
    sections: dict[str, Callable[[SavedRun], Values]] = {
        "experiment": lambda run: flatten(run.exp),
        "config": lambda run: flatten(_dict(run.path / CONFIG)),
        "code": _code,
        "environment": lambda run: flatten({key: value for key, value in run.env.items() if key not in _IGNORED}),
        "data": _data,
        "status": lambda run: {"state": run.state, "step": run.status.get("step"), "attempts": run.attempts},
        "scores": lambda run: summarize(run.path / SCORES).last,
    }
    differing, warnings = {}, []
    runs = SavedRun(one), SavedRun(other)
    for name, values in sections.items():
        both = []
        for run in runs:
            try:
                with reading(run.path):
                    both.append(values(run))
            except UserError as error:
                warnings.append(f"{name} not compared: {error}")
        if len(both) == 2 and (changed := _changes(*both)):
            differing[name] = changed
    if "config" in differing:  # the config repeats the experiment dict and adds defaults
        differing["config"] = {
            key: pair for key, pair in differing["config"].items() if pair != differing.get("experiment", {}).get(key)
        }
        if not differing["config"]:
            del differing["config"]
    return differing, warnings


def _changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference:
    differing = {}
    for key in dict.fromkeys([*one, *other]):
        pair = {side: values[key] for side, values in (("a", one), ("b", other)) if key in values}
        if len(pair) < 2 or json.dumps(pair["a"], sort_keys=True) != json.dumps(pair["b"], sort_keys=True):
            differing[key] = pair
    return differing


def _dict(path: Path) -> Values:
    """The dict in a file of a run; empty if the file is missing."""
    value = read_json(path, RunError, {})
    if not isinstance(value, dict):
        raise RunError(f"{path}: expected a dict, got {type(value).__name__}.")
    return value


def _code(run: SavedRun) -> Values:
    """Commit, and the uncommitted changes at the last start as lines."""
    values = {key: value for key, value in run.env.items() if key in _CODE}
    return {**values, DIFF: run.patch.decode(errors="replace").splitlines()}


def _data(run: SavedRun) -> Values:
    """Fingerprints of the training data, from the newest checkpoint."""
    if inputs := training_inputs(run):
        return inputs
    raise RunError(
        f"{run.path}: no checkpoint is left that records its data, so they are unknown. Compare runs with checkpoints."
    )


def _text(names: Mapping[str, str], differing: Mapping[str, Difference], patch: Sequence[str] | None) -> str:
    lines = [f"a: {names['a']}", f"b: {names['b']}"]
    for section, changes in differing.items():
        lines += ["", section]
        for key, pair in changes.items():
            if key != DIFF:
                lines.append(f"    {key}: {_side_text(pair, 'a')} -> {_side_text(pair, 'b')}")
            elif patch is None:
                lines += _indent(
                    list(difflib.unified_diff(pair["a"], pair["b"], f"a/{DIFF}", f"b/{DIFF}", "", "", 1, ""))
                )
    if patch:
        lines += ["", "code, from a to b", *_indent(patch)]
    return "\n".join(lines if differing else [*lines, "", "nothing differs"])


def _indent(lines: Sequence[str]) -> list[str]:
    more = [f"    … {len(lines) - MAX_LINES} more lines"] if len(lines) > MAX_LINES else []
    return [f"    {line}" for line in lines[:MAX_LINES]] + more


def _side_text(pair: Mapping[str, Any], side: str) -> str:
    return json.dumps(pair[side], ensure_ascii=False) if side in pair else "absent"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.diff", __doc__)
    run_arguments.add(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
