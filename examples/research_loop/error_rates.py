"""How often the verdict of `results.compare` is right, over repetitions with new seeds:
`python examples/research_loop/error_rates.py [--repetitions 20]`.

The base has a learning rate that is 10 times too low. The planted improvement is the right one; the planted
non-improvement is the base with three other seeds. An interrupted measurement continues with the same command.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import loop

from src.tables import results
from src.tables.comparability import Family
from src.tables.comparison import BETTER, SAME, compare

FIRST_SEED = 1000
IMPROVEMENT = {"loop.learning_rate": 4e-3}
TOKENS = 10_240
"""Budget of a run: a quarter of that of the loop."""


def main() -> int:
    """Train and print both rates. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-sb", "--runs", type=Path, default=Path("results/error_rates"), help="folder of the runs")
    parser.add_argument("-d", "--data_path", type=Path, default=Path("results/data"), help="folder of the data")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    count = options.repetitions
    seeds = [tuple(range(FIRST_SEED + 6 * i, FIRST_SEED + 6 * i + 6)) for i in range(count)]
    budget = {"loop.budget.tokens": TOKENS, "data.val_sequences": 32}
    base_ids = loop.train(budget, options, tuple(seed for six in seeds for seed in six))
    better_ids = loop.train({**budget, **IMPROVEMENT}, options, tuple(seed for six in seeds for seed in six[:3]))
    if base_ids is None or better_ids is None:
        raise SystemExit("error: a run failed; its log is in the save directory.")
    rows = {row["exp_id"]: row for row in results.load_rows(options.runs)[0]}

    def select(ids: list[str], numbers: tuple[int, ...]) -> Family:
        """The runs with these seeds."""
        return Family([rows[name] for name in ids if rows[name]["seed"] in numbers], options.runs)

    for min_effect in (0.0, loop.MIN_EFFECT):
        verdicts: dict[str, Counter[str]] = {"improvement": Counter(), "other seeds": Counter()}
        for six in seeds:
            candidates = {"improvement": select(better_ids, six[:3]), "other seeds": select(base_ids, six[3:])}
            for name, candidate in candidates.items():
                (result,) = compare(select(base_ids, six[:3]), [candidate], loop.METRIC, min_effect=min_effect)
                verdicts[name][result.verdict] += 1
        print(f"minimum effect {min_effect:g}:")
        print(f"  the improvement is better in {verdicts['improvement'][BETTER]} of {count}")
        print(f"  other seeds are {SAME} in {verdicts['other seeds'][SAME]} of {count} {dict(verdicts['other seeds'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
