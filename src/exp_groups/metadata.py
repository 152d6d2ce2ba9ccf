"""Language models on documents with metadata."""

from typing import Any

# Pieces of the standard library's documentation (python -m data_prep.stdlib_pages), half of them with their HTML and, each half of the
# time, address and title. Of the tags those of layout are left out, and links, which stand in the middle of sentences.
METADATA_TINY: dict[str, Any] = {
    "recipe": "metadata_lm",
    "seed": 0,
    "model": {
        "name": "gpt_bigcode",
        "tokenizer": "stdlib_tokenizer",
        "hidden_size": 96,
        "num_layers": 3,
        "num_heads": 4,
        "max_positions": 512,
    },
    "data": {
        "name": "metadata",
        "corpus": "stdlib_pages",
        "sequence_tokens": 320,
        "open_rows": 8,
        "probability": 0.5,
        "sampling": "independent",
        "weights": {"html": 1.0, "url": 0.5, "title": 0.5},
        "val_documents": 300,
        "writing": {
            "keys": ["url", "title", "html"],
            "html": {
                "attributes": ["class"],
                "leave_out": [{"tag": tag} for tag in ("a", "body", "dl", "font", "small", "table", "td", "tr")],
            },
        },
    },
    "loop": {
        "steps": 600,
        "sequences_per_step": 4,
        "micro_batch": 4,
        "learning_rate": 4e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "eval_every": 300,
    },
    "gains": {"columns": ["html", "url", "title"], "documents": 300},
}

GROUPS = {"metadata_tiny": [METADATA_TINY]}
