# PYTHON_ARGCOMPLETE_OK
"""Compare experiments over seeds, with intervals and a verdict: `python -m results.compare BASE CANDIDATE..`.

BASE and CANDIDATE are a group, a save directory or the start of an id (with its runs of other seeds), or an expression
as for --where. Several experiments in a CANDIDATE are several candidates.
"""

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from src.errors import ConfigError, print_errors
from src.runs.environment import evaluation_digest
from src.support import documents
from src.support.command_line import make_parser, parse_arguments
from src.tables import comparability, results, run_arguments
from src.tables.comparability import Family
from src.tables.comparison import MAX_SEEDS, SAME, Comparison, compare
from src.tables.results import FINISHED, Row
from src.tables.statistics import mean
from src.tables.terminal_table import draw_rich, plain

_ID_START = re.compile(r"[0-9a-f]{4,128}")
_GROUP = re.compile(r"[^\W\d][\w-]*")


class Document(documents.Document):
    """Differences of each candidate from the base. Numbers that are not finite are null."""

    schema: Literal["results.compare/1"]
    metric: str
    min_effect: float
    base: dict[str, Any]
    """`exp_ids`, `seeds`, `mean` and `cost` by unit."""
    candidates: list[dict[str, Any]]
    """The same, and `difference`, `t_interval`, `bootstrap_interval`, `pairs` of seeds, `is_paired`, `samples`, `p`,
    `verdict` (better, worse, not distinguishable), `more_seeds`, `diverged_seeds`, `failed_seeds` and `differences` by
    section. `base_mean` is that of the seeds that are compared."""
    commands: list[str] | None
    """With `--run-missing`: commands that train the missing seeds."""


@dataclass
class Report:
    """All comparisons of one base."""

    base: Family
    metric: str
    min_effect: float
    comparisons: list[Comparison]
    warnings: list[str]


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison. Returns the exit code, 0 for any verdict."""
    options = parse_arguments(_parser(), arguments, has_json=True)
    report = make_report(
        options.runs,
        options.base,
        options.candidates,
        options.metric,
        lowest=options.lowest,
        min_effect=options.min_effect,
        seed=options.seed_key,
    )
    run_arguments.warn(report.warnings)
    commands = None
    if options.run_missing:
        commands = missing_commands(report, options.runs, options.data_path, options.seed_key)
        trainings = sum(command.count(",") + 1 for command in commands)
        run_arguments.warn([f"{trainings} trainings are missing."])
    content = to_dict(report, options.seed_key) | {"commands": commands}
    write = partial(_print_text, content) if commands is None else partial(print, *commands, sep="\n")
    run_arguments.show(options.output, "results.compare/1", content, write)
    return 0


def make_report(  # noqa: PLR0913  call sites pass the optional ones by name
    runs: Path,
    base: str,
    candidates: Sequence[str],
    metric: str = "val_loss",
    *,
    lowest: bool | None = None,
    min_effect: float = 0.0,
    seed: str = results.SEED,
) -> Report:
    """Compare the experiments that the words select in the folder `runs`; see `comparison.compare`.

    Raises:
        ConfigError: a word selects no run, `base` selects several experiments, no candidate remains, the evaluations
            differ, or no finished run has the metric.
        DataError: there is no such folder, or it contains no run.
    """
    rows, warnings = results.load_rows(runs)
    of_base = select_families(base, rows, runs, seed)
    if len(of_base) > 1:
        names = ", ".join(family.rows[0]["exp_id"][:8] for family in of_base[:5])
        raise ConfigError(f"{base}: selects {len(of_base)} experiments, expected one: {names}. Name one by its id.")
    base_ids = {row["exp_id"] for row in of_base[0].rows}
    by_ids = {
        frozenset(row["exp_id"] for row in family.rows): family
        for word in candidates
        for family in select_families(word, rows, runs, seed)
    }
    families = [family for ids, family in by_ids.items() if base_ids.isdisjoint(ids)]
    if not families:
        raise ConfigError(f"{' '.join(candidates)}: selects only the base. Name another experiment.")
    results.check_known("score", [metric], results.score_names(rows), "--metric")
    for family in families:
        warnings += comparability.require_same_evaluation(of_base[0], family, metric)
    comparisons = compare(of_base[0], families, metric, lowest, min_effect, seed)
    for family in (of_base[0], *families):
        warnings += comparability.code_warnings(family)
        unfinished = [row["exp_id"][:8] for row in family.rows if row["state"] not in FINISHED]
        if unfinished:
            warnings.append(f"not finished, so there is no verdict: {', '.join(unfinished)}.")
    return Report(of_base[0], metric, min_effect, comparisons, list(dict.fromkeys(warnings)))


def select_families(word: str, rows: Sequence[Row], runs: Path, seed: str = results.SEED) -> list[Family]:
    """The experiments that a word selects: a group, a run, or an expression; always with all of their seeds, as seeds
    chosen by their results are no sample. Selected runs are first.

    Raises:
        ConfigError: it selects no run, or the start of an id is not unique.
    """
    members = {row["exp_id"] for row in rows if word in row.groups}
    if not members and (Path(word).is_dir() or _ID_START.fullmatch(word)):
        members = {run_arguments.find_run(word, runs).resolve().name} & {row["exp_id"] for row in rows}
        if not members:
            raise ConfigError(f"{word}: expected a run of {runs}. Name its folder with --runs.")
    if not members and _GROUP.fullmatch(word) and not any(word in row for row in rows):
        results.check_known("group", [word], {name for row in rows for name in row.groups}, "results.compare")
    members = members or {row["exp_id"] for row in results.filter_rows(rows, word, repr(word))}
    if not members:
        raise ConfigError(f"{word!r} matches none of {len(rows)} runs of {runs}.")
    families = comparability.families(rows, rows, runs, seed)
    for family in families:
        family.rows.sort(key=lambda row: row["exp_id"] not in members)
    return [family for family in families if not members.isdisjoint(row["exp_id"] for row in family.rows)]


def to_dict(report: Report, seed: str = results.SEED) -> dict[str, Any]:
    """The report as JSON values. NaN and infinity become None."""

    def describe(family: Family) -> dict[str, Any]:
        return {
            "exp_ids": [row["exp_id"] for row in family.rows],
            "seeds": [row.get(seed) for row in family.rows],
            "cost": comparability.cost(family),
        }

    return documents.plain(
        {
            "metric": report.metric,
            "min_effect": report.min_effect,
            "base": {**describe(report.base), "mean": mean(report.base.rows, report.metric)},
            "candidates": [
                {
                    **{name: value for name, value in vars(each).items() if name != "candidate"},
                    **describe(each.candidate),
                    "differences": comparability.differences(report.base, each.candidate, seed),
                }
                for each in report.comparisons
            ],
        }
    )


def missing_commands(report: Report, runs: Path, data: Path, seed: str = results.SEED) -> list[str]:
    """Commands that train the further seeds which open comparisons need, on both sides. Seeds that one side already
    has are used first.

    Raises:
        ConfigError: a run has a parent, which can differ between seeds; or the evaluation code is not that of the runs.
    """
    open_comparisons = [each for each in report.comparisons if each.verdict == SAME and each.more_seeds]
    families = [report.base, *(each.candidate for each in open_comparisons)] if open_comparisons else []
    seeds_of = {id(family): [row.get(seed) for row in family.rows] for family in families}
    counts = Counter(value for used_seeds in seeds_of.values() for value in used_seeds if isinstance(value, int))
    shared_first = sorted(counts, key=lambda value: (-counts[value], value))
    order = [*shared_first, *range(max(shared_first, default=-1) + 1, MAX_SEEDS + len(shared_first))]
    commands = []
    for family in families:
        if any(key.endswith("exp_id") and key != "exp_id" for key in family.rows[0]):
            raise ConfigError(
                f"--run-missing: {family.rows[0]['exp_id']} has a parent, which can differ between seeds. "
                "Add seeds to its group in exp_configs.py."
            )
        codes = {comparability.evaluation_code(family, run) for run in family.runs} - {None}
        if codes - {evaluation_digest()}:
            raise ConfigError(
                f"--run-missing: {family.rows[0]['exp_id']} was evaluated with other code, so it could not be compared "
                "with new seeds. Check out its commit (results.diff names it), or run all seeds again."
            )
        count = max(
            each.pairs + (each.more_seeds or 0)
            for each in open_comparisons
            if any(family is side for side in (report.base, each.candidate))
        )
        missing = [str(value) for value in order[:count] if value not in seeds_of[id(family)]]
        if not missing:
            continue
        words = ["python", "trainval.py", "--exp_id", family.rows[0]["exp_id"], "--set", f"{seed}={','.join(missing)}"]
        commands.append(shlex.join([*words, "-sb", str(runs), "--data_path", str(data)]))
    return commands


def _print_text(content: dict[str, Any]) -> None:
    headings = [
        "candidate",
        "mean",
        "base",
        "difference",
        "t interval",
        "bootstrap interval",
        "seeds",
        "samples",
        "p",
        "verdict",
    ]
    lines = []
    for each in content["candidates"]:
        cells = [each["exp_ids"][0][:8], *(_format(each[name]) for name in ("mean", "base_mean", "difference"))]
        cells += [_format_interval(each[name]) for name in ("t_interval", "bootstrap_interval")]
        note = "" if each["is_paired"] else " (not paired)"
        lines.append([*cells, f"{each['pairs']}{note}", plain(each["samples"]), f"{each['p']:.3g}", each["verdict"]])
    base = content["base"]
    about = f"{content['metric']}, candidate minus base ({base['exp_ids'][0][:8]}: {_format(base['mean'])})"
    draw_rich(headings, lines, f"{about}. 95 % intervals; minimum effect {content['min_effect']:g}.")
    for each in content["candidates"]:
        print(f"\n{each['exp_ids'][0][:8]}: {each['verdict']}{_advice(each, content['min_effect'])}")
        for section, changes in each["differences"].items():
            print(f"  {section}")
            for key, (before, after) in changes.items():
                print(f"    {key}: {json.dumps(before)} -> {json.dumps(after)}")
        for name, side in (("base", base), ("candidate", each)):
            costs = ", ".join(f"{value:.4g} {unit}" for unit, value in side["cost"].items()) or "not recorded"
            print(f"  cost of the {name}, {len(side['exp_ids'])} runs: {costs}")


def _advice(candidate: dict[str, Any], min_effect: float) -> str:
    if candidate["diverged_seeds"]:
        return f": ended in NaN with seed {', '.join(map(str, candidate['diverged_seeds']))}"
    if candidate["failed_seeds"]:
        seeds = ", ".join(map(str, candidate["failed_seeds"]))
        return f": no verdict, as seed {seeds} failed or has not finished; resume or remove it"
    if candidate["verdict"] != SAME or candidate["more_seeds"] == 0:
        return ""
    width = f"± {_format(min_effect or abs(candidate['difference']))}"
    if candidate["more_seeds"] is None:
        return f"; an interval of {width} needs too many seeds; set --min-effect to what matters"
    return f"; an interval of {width} needs about {candidate['more_seeds']} more seeds"


def _format(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.4g}"


def _format_interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.4g} to {interval[1]:.4g}"


def add_verdict_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verdict: the score, its direction, and the minimum effect."""
    parser.add_argument("--metric", default="val_loss", metavar="SCORE", help="score to compare (default: val_loss)")
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--higher",
        dest="lowest",
        action="store_false",
        default=None,
        help="a high score is good (default: by the name of the score)",
    )
    direction.add_argument("--lower", dest="lowest", action="store_true", help="a low score is good")
    parser.add_argument(
        "--min-effect",
        type=float,
        default=0.0,
        metavar="X",
        help="smallest difference that matters, in units of the score (default: 0)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.compare", __doc__)
    parser.add_argument("base", metavar="BASE", help="the experiment to improve on")
    parser.add_argument("candidates", nargs="+", metavar="CANDIDATE", help="one or several experiments")
    parser.add_argument(
        "-r",
        "--runs",
        type=Path,
        default=run_arguments.RUNS,
        metavar="DIR",
        help=f"folder of runs (default: {run_arguments.RUNS})",
    )
    add_verdict_options(parser)
    parser.add_argument(
        "--seed-key", default=results.SEED, metavar="KEY", help=f"the key to pair by (default: {results.SEED})"
    )
    parser.add_argument(
        "--run-missing",
        action="store_true",
        help="print only the commands that train the missing seeds, one per line, to pipe to sh",
    )
    parser.add_argument(
        "-d",
        "--data_path",
        type=Path,
        default=Path("results/data"),
        metavar="DIR",
        help="prepared data sets, for the commands of --run-missing (default: %(default)s)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the text to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
