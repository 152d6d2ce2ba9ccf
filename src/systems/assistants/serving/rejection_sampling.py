"""Keeps the best sampled answers: `python -m src.systems.assistants.serving.rejection_sampling REPORT REWARD_RUN
--output FOLDER`.

REPORT is a file of src.systems.assistants.serving.sampling_report; REWARD_RUN a save directory of recipe `reward`, a
prefix of its id, or a checkpoint. Select the --best answers of the highest reward per prompt, the best first. Equal
answers count once. FOLDER gets: selected_samples.json and rejected_samples.json, lists of {"prompt", "output",
"sampling_config", "reward"}; comparison.json, the mean, least and highest reward of both; sampling_score.json, the mean
reward of each sampling configuration and of all.

Train on the selected answers with `python -m data_prep.assistants.prepare_conversations --form completion --columns
completion=output`.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from src.data.jsonl import check_text
from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.files import new_directory, read_json, write_json
from src.models.load import add_options
from src.support.command_line import aligned_lines, make_parser, parse_arguments, run_command
from src.systems.assistants.conversations.entries import Message
from src.systems.assistants.serving.rewards import load_judge


class Answer(NamedTuple):
    """An answer of a report."""

    number: int
    """Number of its prompt in the report."""
    prompt: str
    output: str
    sampling_config: str
    reward: float = 0.0


def read_report(path: Path) -> list[Answer]:
    """The answers of a report, prompt by prompt, without rewards.

    Raises:
        DataError: it is missing, or no report; or it has no answer.
    """

    def text(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"expected text, got {type(value).__name__}")
        check_text(value, str(path))
        return value

    try:
        answers = [
            Answer(number, text(entry["prompt"]), text(output), text(result["sampling_config"]))
            for number, entry in enumerate(read_json(path, DataError)["prompts"])
            for result in entry["results"]
            for output in result["outputs"]
        ]
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{path}: no report of src.systems.assistants.serving.sampling_report ({type(error).__name__}: {error})."
        ) from None
    if not answers:
        raise DataError(f"{path}: the report has no answer.")
    return answers


def select_best(answers: Sequence[Answer], best: int) -> tuple[list[Answer], list[Answer]]:
    """(selected, rejected) answers, prompt by prompt, each by falling reward.
    Of equal answers to a prompt the first counts."""
    prompts: dict[int, dict[str, Answer]] = {}
    for answer in answers:
        prompts.setdefault(answer.number, {}).setdefault(answer.output, answer)
    ordered = [sorted(group.values(), key=lambda answer: -answer.reward) for group in prompts.values()]
    return [answer for group in ordered for answer in group[:best]], [
        answer for group in ordered for answer in group[best:]
    ]


def summarize(answers: Sequence[Answer]) -> Mapping[str, float | None]:
    """Mean, least and highest reward; None of no answer."""
    rewards = [answer.reward for answer in answers]
    return (
        {"mean": fmean(rewards), "min": min(rewards), "max": max(rewards)}
        if rewards
        else dict.fromkeys(("mean", "min", "max"))
    )


def mean_rewards(answers: Sequence[Answer]) -> Mapping[str, float]:
    """Mean reward by sampling configuration, and "mean_reward" of all."""
    by_config: dict[str, list[float]] = {}
    for answer in answers:
        by_config.setdefault(answer.sampling_config, []).append(answer.reward)
    return {
        **{name: fmean(rewards) for name, rewards in by_config.items()},
        "mean_reward": fmean(answer.reward for answer in answers),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.systems.assistants.serving.rejection_sampling", __doc__)
    add = parser.add_argument
    add("sampled", type=Path, metavar="REPORT", help="of src.systems.assistants.serving.sampling_report")
    add("run", type=Path, metavar="REWARD_RUN", help="a run of recipe `reward`, a prefix of its id, or a checkpoint")
    add("--output", type=Path, required=True, metavar="FOLDER", help="output file; overwritten")
    add("--best", type=int, default=3, metavar="N", help="answers to a prompt that are selected (default: %(default)s)")
    add("--micro_batch", type=int, default=32, help="answers in one forward pass (default: %(default)s)")
    add_options(parser)
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    if args.best < 1:
        raise ConfigError(f"--best: expected at least 1, got {args.best}.")
    answers = read_report(args.sampled)
    judge = load_judge(args.run, Places(args.data_path, args.savedir_base), args.device, args.micro_batch)
    rewards = judge.rewards([([Message("user", answer.prompt)], answer.output) for answer in answers])
    answers = [answer._replace(reward=reward) for answer, reward in zip(answers, rewards, strict=True)]
    selected, rejected = select_best(answers, args.best)
    scores = mean_rewards(answers)
    with new_directory(args.output) as folder:
        for name, chosen in (("selected", selected), ("rejected", rejected)):
            rows = [{key: value for key, value in answer._asdict().items() if key != "number"} for answer in chosen]
            write_json(folder / f"{name}_samples.json", rows)
        write_json(folder / "comparison.json", {"selected": summarize(selected), "rejected": summarize(rejected)})
        write_json(folder / "sampling_score.json", scores)
    for line in aligned_lines([[name, f"{score:.3f}"] for name, score in scores.items()]):
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
