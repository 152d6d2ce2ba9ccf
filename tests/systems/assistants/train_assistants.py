"""Small experiments of the assistants' recipes on conversations about numbers, and their data."""

from pathlib import Path
from typing import Any

from src.experiments.grid import ref
from tests.systems.assistants.conversations import talk

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
TALK = {"name": "conversations", "corpus": "numbers", "sequence_tokens": 64}
REPLIES = {"name": "ranked_replies", "corpus": "replies", "sequence_tokens": 64}
LOOP = {"steps": 8, "sequences_per_step": 4, "micro_batch": 2, "learning_rate": 3e-3, "eval_every": 4}
SFT: dict[str, Any] = {
    "recipe": "sft",
    "seed": 0,
    "model": {
        "name": "gpt_bigcode",
        "tokenizer": "talk_tokenizer",
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "max_positions": 96,
    },
    "data": TALK,
    "loop": LOOP,
    "answers": {"questions": 4, "max_new_tokens": 3, "metrics": [{"name": "squad"}]},
}
REWARD: dict[str, Any] = {
    "recipe": "reward",
    "seed": 0,
    "model": {"name": "reward", "base": ref(SFT)},
    "data": REPLIES,
    "loop": LOOP,
}
DPO: dict[str, Any] = {
    "recipe": "dpo",
    "seed": 0,
    "model": ref(SFT),
    "data": {**REPLIES, "max_replies": 2},
    "loop": LOOP,
}
KTO: dict[str, Any] = {
    "recipe": "kto",
    "seed": 0,
    "model": ref(SFT),
    "data": {**REPLIES, "name": "labeled_replies", "group_size": 3},
    "loop": LOOP,
}


def write_data(data: Path) -> Path:
    """Write conversations, ranked replies and their tokenizer below `data`."""
    rows = [talk.row(f"{i % 8 + 1}?", WORDS[i % 8], *(["more", "no"] if i % 3 == 0 else [])) for i in range(24)]
    ranked_rows = []
    for i in range(24):
        replies = [WORDS[i % 8], WORDS[(i + 1) % 8], "x" * (i % 5 + 1), "none of " * 2][: 2 + i % 3]
        ranked_replies = [{"content": text, "rank": rank} for rank, text in enumerate(replies)]
        ranked_rows.append({"messages": [{"role": "user", "content": f"{i % 8 + 1}?"}], "replies": ranked_replies})
    talk.write_rows(data / "numbers", {"train": rows, "val": rows[:6]})
    talk.write_rows(data / "replies", {"train": ranked_rows, "val": ranked_rows[:6]})
    talk.tokenizer().save_pretrained(data / "talk_tokenizer")
    return data
