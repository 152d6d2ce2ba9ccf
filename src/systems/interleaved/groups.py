"""Vision-language models trained on documents that are streamed from tars."""

from typing import Any

from src.experiments.grid import grid, override, seeds

# Pages of handwritten digits between words (python -m data_prep.interleaved.digit_pages): read the digits and add
# them.
INTERLEAVED_TINY: dict[str, Any] = {
    "recipe": "interleaved",
    "seed": 0,
    "model": {
        "name": "vision_language",
        "tokenizer": "digit_pages/tokenizer",
        "vision": {"frame_size": 8, "patch_size": 2, "hidden_size": 64, "num_layers": 1, "num_heads": 4},
        "scale_factor": 4,
        "max_tiles": 3,
        "hidden_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "max_positions": 256,
    },
    "data": {
        "name": "streamed",
        "sources": {"digits": {"path": "digit_pages"}},
        "images": {"frame_size": 8, "image_tokens": 1, "max_size": 24},
        "sequence_tokens": 128,
        "max_frames": 16,
        "open_rows": 8,
        "window": 1000,
    },
    "loop": {
        "steps": 800,
        "sequences_per_step": 8,
        "micro_batch": 8,
        "learning_rate": 3e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "eval_every": 400,
    },
    "answers": {
        "questions": 200,
        "max_new_tokens": 24,
        "metrics": [{"name": "words"}, {"name": "squad"}],
        "shuffled_context": True,
    },
}

# The pages mixed with captioned photographs; docs/streaming.md prepares them from released tars.
INTERLEAVED_PHOTOGRAPHS = override(
    INTERLEAVED_TINY,
    {
        "data.sources": {
            "digits": {"path": "digit_pages", "rate": 3.0},
            "photographs": {"path": "photographs", "rate": 1.0},
        }
    },
)

# SmolLM2-135M (`make smollm2`), frozen, reads the digits through a small encoder with random weights.
SMOLLM2_DIGITS = override(
    INTERLEAVED_TINY,
    {
        "model": {
            "name": "vision_language_parts",
            "vision": INTERLEAVED_TINY["model"]["vision"],
            "text": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "scale_factor": 4,
            "max_tiles": 3,
            "frozen": ["text"],
        },
        "loop.steps": 400,
        "loop.eval_every": 200,
        "loop.learning_rate": 1e-3,
        "loop.precision": "bfloat16",
    },
)

GROUPS = {
    "interleaved_photographs": [INTERLEAVED_PHOTOGRAPHS],
    "interleaved_tiny": [INTERLEAVED_TINY],
    "interleaved_tiny_seeds": grid(INTERLEAVED_TINY, {"seed": [1, 2, 3]}),
    "smollm2_digits": seeds([SMOLLM2_DIGITS], 3),
}
