"""Evaluate a reward model on ranked replies: `python -m src.systems.assistants.serving.reward_evaluation RUN FOLDER
--report FILE`.

RUN is a save directory of recipe `reward`, a prefix of its id, or a checkpoint. FOLDER is a prepared folder of ranked
replies, below --data_path or anywhere else. The report is JSON with the same scores as evaluations in training:
accuracy is the share of conversations in which the best reply gets a higher reward than the worst; kendalltau and
spearmanr are correlations of rewards and ranks.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from src.data.jsonl import SPLITS
from src.data.parts import leaf_configs
from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.files import write_json
from src.models.load import add_options, checkpoint_folder, load, move
from src.runs.store import SavedRun, expand_run
from src.support.command_line import aligned_lines, make_parser, parse_arguments, run_command
from src.systems.assistants.conversations import ranked

NAMES = {"kendall": "kendalltau", "spearman": "spearmanr"}
"""Names of scores in the report."""


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
    count, scores = _measure(args, Places(args.data_path, args.savedir_base))
    report_scores = {NAMES.get(name, name): value for name, value in scores.items()}
    report = {
        "model": str(args.run),
        "dataset": args.folder,
        "split": args.split,
        "conversations": count,
        **report_scores,
    }
    if args.report:
        write_json(args.report, report)
    for line in aligned_lines(
        [[name, f"{value:.3f}" if isinstance(value, float) else str(value)] for name, value in report.items()]
    ):
        sys.stdout.write(f"{line}\n")
    return 0


def _measure(args: argparse.Namespace, places: Places) -> tuple[int, Mapping[str, float]]:
    """(number of conversations in the folder, the recipe's evaluation scores by name).

    Raises:
        ConfigError: the run has no reward model, or the device or --micro_batch is invalid.
        DataError: the folder is missing or malformed, or has no replies of different ranks.
        UserError: a part of the model is missing.
    """
    from src.training.validation import measure

    if args.micro_batch < 1:
        raise ConfigError(f"--micro_batch: expected at least 1, got {args.micro_batch}.")
    source = expand_run(args.run, places.runs)
    run = checkpoint_folder(source).parents[1]
    recipe: Any = load_experiment(SavedRun(run).exp, str(run))
    if recipe.name != "reward":
        raise ConfigError(f"{run}: expected a run of recipe 'reward', got {recipe.name!r}.")
    parts = leaf_configs("data", recipe.data)
    config = next((part for _, part in parts if isinstance(part, ranked.Config)), None)
    assert config is not None, "the recipe reads only ranked replies"
    model, tokenizer = load(source, places)
    move(model, args.device)
    config = config.model_copy(update={"corpus": args.folder, "val_samples": None, "shuffled_ranks": False})
    data = ranked.RankedReplies(config, places, tokenizer, args.split, None)
    sums = measure(model, data, recipe.loss(), args.micro_batch, model.base.device, count=recipe.count)
    return len(data), {"loss": sums.loss, **sums.means}


if __name__ == "__main__":
    sys.exit(main())
