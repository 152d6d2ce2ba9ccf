"""How often a reward model prefers the answers of trained policies to those of the models they were trained from.

    OMP_NUM_THREADS=1 python -m benchmarks.assistants.win_rate JUDGES CORPUS [GROUP...] [--prompts 24]
        [--new_tokens 64] [--lengths CORPUS...] [--data_path DIR] [-sb DIR]

JUDGES and each GROUP are groups in exp_configs.py; runs that are not done are skipped. The first run of JUDGES, of
recipe `reward`, is the judge. Each run of a GROUP and the run it started from answer the first --prompts validation
prompts of CORPUS, a folder of ranked replies, greedily; prompts of more than 256 tokens are skipped. A line per run:
the share of the answers that differ with the higher reward, the share that are longer (in characters), and the number
that differ. A line per group: means with 95 % intervals over the runs (Student's t).

--lengths, repeatable: the share of validation rows whose best reply is longer than the worst, as mean and interval over
these folders.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from exp_configs import EXP_GROUPS
from src.data import jsonl
from src.data.jsonl import SPLITS
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.models.load import PLACES
from src.runs.store import SavedRun
from src.serving.pretrained import load_writer
from src.systems.assistants.conversations.entries import Entry, Message, read_entry
from src.systems.assistants.serving import reward_evaluation
from src.systems.assistants.serving.conversation import Talk
from src.tables.statistics import ci95

LONGEST_PROMPT = 256


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judges", metavar="JUDGES")
    parser.add_argument("corpus", metavar="CORPUS")
    parser.add_argument("groups", metavar="GROUP", nargs="*")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--lengths", action="append", nargs="+", default=[], metavar="CORPUS")
    parser.add_argument("--data_path", type=Path, default=PLACES.data)
    parser.add_argument("-sb", "--savedir_base", type=Path, default=PLACES.runs)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = options().parse_args(argv)
    places = Places(args.data_path, args.savedir_base)
    for folders in args.lengths:
        shares = [longest_share(ranked_rows(places.data / name)) for name in folders]
        print(f"{' '.join(folders)}: the best reply is longer in {spell(shares)} of the rows", flush=True)
    prompts = [list(entry.messages) for entry in ranked_rows(places.data / args.corpus)]

    @cache
    def answers(run: str) -> list[tuple[int, str]]:
        """(index of the prompt, answer) of the first prompts that are short enough."""
        talk, _ = load_writer(places.runs / run, places)
        assert isinstance(talk, Talk)
        ids = [(k, talk.prompt_ids(prompt)) for k, prompt in enumerate(prompts)]
        short = [(k, each) for k, each in ids if len(each) <= LONGEST_PROMPT][: args.prompts]
        return [(k, talk.generate(each, max_new_tokens=args.new_tokens, do_sample=False)[0]) for k, each in short]

    judge_run = places.runs / exp_id(EXP_GROUPS[args.judges][0])
    for group in args.groups:
        rates = []
        for number, exp in enumerate(EXP_GROUPS[group]):
            run = places.runs / exp_id(exp)
            if not run.is_dir() or SavedRun(run).state != "done":
                print(f"{group}[{number}]: not done")
                continue
            pairs = zip(answers(exp_id(exp)), answers(exp["model"]["exp_id"]), strict=True)
            different = [(prompts[k], mine, other) for (k, mine), (_, other) in pairs if mine != other]
            if not different:
                print(f"{group}[{number}]: no answer differs", flush=True)
                continue
            longer = statistics.fmean(len(mine) > len(other) for _, mine, other in different)
            rates.append((preferred_share(judge_run, places, different), longer))
            print(
                f"{group}[{number}]: preferred {rates[-1][0]:.3f}, longer {longer:.3f} of {len(different)}", flush=True
            )
        if rates:
            preferred_text, longer_text = map(spell, zip(*rates, strict=True))
            print(f"{group}: preferred {preferred_text}, longer {longer_text}", flush=True)


def spell(shares: Sequence[float]) -> str:
    """Their mean, with half the 95 % interval if there are several."""
    interval = ci95(shares)
    return f"{statistics.fmean(shares):.3f}" + ("" if interval is None else f" ± {interval:.3f}")


def ranked_rows(folder: Path) -> list[Entry]:
    """The validation rows of a folder of ranked replies."""
    path = folder / "val.jsonl"
    return [read_entry(jsonl.parse(line, str(path)), str(path)) for line in path.read_bytes().splitlines()]


def longest_share(entries: Sequence[Entry]) -> float:
    """The share whose best reply has more characters than the worst."""
    sorted_replies = [sorted(entry.replies, key=lambda reply: reply.rank) for entry in entries]
    return statistics.fmean(len(replies[0].content) > len(replies[-1].content) for replies in sorted_replies)


def preferred_share(judge: Path, places: Places, pairs: Sequence[tuple[Sequence[Message], str, str]]) -> float:
    """The share of (prompt, answer, other answer) whose first answer has the higher reward, by `reward_evaluation`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            {
                "messages": [message.raw for message in prompt],
                "replies": [{"content": answer, "rank": rank} for rank, answer in enumerate(answers)],
            }
            for prompt, *answers in pairs
        ]
        for split in SPLITS:  # a prepared folder has both
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        report = folder / "report.json"
        words = ["--data_path", str(places.data), "--savedir_base", str(places.runs), "--device", "cpu"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert reward_evaluation.main([str(judge), str(folder), "--report", str(report), *words]) == 0
        return json.loads(report.read_text())["accuracy"]


if __name__ == "__main__":
    main()
