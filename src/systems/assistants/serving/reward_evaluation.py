"""Measures a reward model on ranked replies: `python -m src.systems.assistants.serving.reward_evaluation RUN FOLDER
--report FILE`.

RUN is a save directory of recipe `reward`, a prefix of its id, or a checkpoint. FOLDER is a prepared folder of ranked
replies, below --data_path or anywhere else. The report is JSON with the scores of an evaluation in training: accuracy
is the share of conversations in which the best reply gets a higher reward than the worst; kendalltau and spearmanr are
correlations of rewards and ranks.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from src.data.jsonl import SPLITS
from src.experiments.config import Places
from src.files import write_json
from src.models.load import add_options
from src.support.command_line import aligned_lines, make_parser, parse_arguments, run_command
from src.systems.assistants.serving.rewards import load_judge

NAMES = {"kendall": "kendalltau", "spearman": "spearmanr"}
"""What scores are called in the report."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.systems.assistants.serving.reward_evaluation", __doc__)
    add = parser.add_argument
    add("run", type=Path, help="a run of recipe `reward`, a prefix of its id, or a checkpoint")
    add("folder", help="ranked replies")
    add("--split", choices=SPLITS, default="val", help="(default: %(default)s)")
    add("--report", type=Path, metavar="FILE", help="JSON to write (default: none)")
    add("--micro_batch", type=int, default=16, help="conversations in one forward pass (default: %(default)s)")
    add_options(parser)
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    places = Places(args.data_path, args.savedir_base)
    judge = load_judge(args.run, places, args.device, args.micro_batch)
    count, scores = judge.agreement(places, args.folder, args.split)
    named = {NAMES.get(name, name): value for name, value in scores.items()}
    report = {"model": str(args.run), "dataset": args.folder, "split": args.split, "conversations": count, **named}
    if args.report:
        write_json(args.report, report)
    for line in aligned_lines(
        [[name, f"{value:.3f}" if isinstance(value, float) else str(value)] for name, value in report.items()]
    ):
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
