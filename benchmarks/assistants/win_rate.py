"""How often a reward model prefers the answers of trained policies to those of the models they were trained from.

    OMP_NUM_THREADS=1 python -m benchmarks.assistants.win_rate JUDGE CORPUS POLICY... [--prompts 32] [--new_tokens 64]
        [--data_path DIR] [-sb DIR]

JUDGE and each POLICY are finished runs or prefixes of their ids; JUDGE is of recipe `reward`. Each policy and its start
answer the first --prompts validation prompts of CORPUS, a folder of ranked replies, greedily. Prompts that have more
than 256 tokens in either chat template are skipped. A line per policy: its share of the answers that differ with the
higher reward, their share that are longer (in characters), and their number.
"""

import argparse
import json
import tempfile
from functools import cache
from pathlib import Path

from src.data import jsonl
from src.experiments.config import Places
from src.models.load import add_options
from src.runs.store import SavedRun, expand_run
from src.serving.pretrained import load_writer
from src.systems.assistants.conversations.entries import Message, read_entry
from src.systems.assistants.serving import reward_evaluation
from src.systems.assistants.serving.conversation import Talk

LONGEST_PROMPT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judge", type=Path)
    parser.add_argument("corpus")
    parser.add_argument("policy", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=64)
    add_options(parser)
    args = parser.parse_args()
    places = Places(args.data_path, args.savedir_base)
    path = places.data / args.corpus / "val.jsonl"
    rows = [jsonl.parse(line, str(path)) for line in path.read_bytes().splitlines()]
    prompts = [list(read_entry(row, str(path)).messages) for row in rows]

    @cache
    def answers(run: Path) -> list[tuple[int, str]]:
        """(index of the prompt, answer) of the first prompts that are short enough."""
        talk, _ = load_writer(run, places)
        assert isinstance(talk, Talk)
        ids = [(k, talk.prompt_ids(prompt)) for k, prompt in enumerate(prompts)]
        short = [(k, each) for k, each in ids if len(each) <= LONGEST_PROMPT][: args.prompts]
        return [(k, talk.generate(each, max_new_tokens=args.new_tokens, do_sample=False)[0]) for k, each in short]

    for policy in args.policy:
        run = expand_run(policy, places.runs)
        start = places.runs / SavedRun(run).exp["model"]["exp_id"]
        pairs = zip(answers(run), answers(start), strict=True)
        different = [(k, mine, other) for (k, mine), (_, other) in pairs if mine != other]
        wins = judge(args, [(prompts[k], mine, other) for k, mine, other in different])
        longer = sum(len(mine) > len(other) for _, mine, other in different) / len(different)
        print(f"{run.name}: preferred {wins:.3f}, longer {longer:.3f} of {len(different)}", flush=True)


def judge(args: argparse.Namespace, pairs: list[tuple[list[Message], str, str]]) -> float:
    """The share of pairs whose first answer has the higher reward, by `reward_evaluation`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            {
                "messages": [message.raw for message in prompt],
                "replies": [{"content": answer, "rank": rank} for rank, answer in enumerate(answers)],
            }
            for prompt, *answers in pairs
        ]
        (folder / "val.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        report = folder / "report.json"
        places = ["--data_path", str(args.data_path), "--savedir_base", str(args.savedir_base)]
        code = reward_evaluation.main([str(args.judge), str(folder), "--report", str(report), *places])
        assert code == 0
        return json.loads(report.read_text())["accuracy"]


if __name__ == "__main__":
    main()
