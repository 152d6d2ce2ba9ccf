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
    {"data.sources.digits.rate": 3.0, "data.sources.photographs": {"path": "photographs", "rate": 1.0}},
)

# Conversations about the pages (digit_pages --chats), with SmolVLM's chat template. Only answers are learned.
INTERLEAVED_CHAT_TINY = override(
    INTERLEAVED_TINY,
    {
        "model.tokenizer": "digit_chats/tokenizer",
        "data.sources": {"digits": {"path": "digit_chats", "chat": True}},
        "data.rules": {"too_long": "drop"},
        "data.sequence_tokens": 192,
        "data.max_frames": 24,
    },
)

# SmolLM2-135M (`make smollm2`) reads the digits through a small encoder with random weights. Its layers are frozen, its
# embeddings are trained.
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
        "loop.steps": 200,
        "loop.eval_every": 100,
        "loop.learning_rate": 1e-3,
        "loop.precision": "bfloat16",
    },
)

# Adapters on pretrained models, for question-answer pages in `--data_path`/my_pages (python -m
# data_prep.interleaved.index): the settings of huggingface/smollm's vision/finetuning/Smol_VLM_FT.ipynb, which are 16
# sequences a step for one epoch of VQAv2-small. Its 4-bit weights and 8-bit AdamW are not used here.
_ADAPTERS: dict[str, Any] = {
    "recipe": "interleaved",
    "seed": 0,
    "model": {
        "name": "lora",
        "rank": 8,
        "alpha": 8.0,
        "dropout_rate": 0.1,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    },
    "data": {"name": "streamed", "sources": {"pages": {"path": "my_pages"}}, "open_rows": 8, "window": 1000},
    "loop": {
        "steps": 600,
        "sequences_per_step": 16,
        "micro_batch": 4,
        "learning_rate": 1e-4,
        "schedule": "linear",
        "warmup_rate": 50 / 600,
        "weight_decay": 0.01,
        "precision": "bfloat16",
        "eval_every": 200,
    },
}


def adapters_on(path: str, sequence_tokens: int, max_frames: int, **images: Any) -> dict[str, Any]:
    """Adapters on a model of the hub. images: of its preprocessor_config.json and processor_config.json."""
    base = {"name": "vision_language_hf", "path": path, "dtype": "bfloat16"}
    sizes = {"sequence_tokens": sequence_tokens, "max_frames": max_frames, "images": images}
    return override(_ADAPTERS, {"model.base": base, **{f"data.{name}": value for name, value in sizes.items()}})


_SMOLVLM: dict[str, Any] = {"frame_size": 512, "image_tokens": 64, "max_size": 2048, "enlarge": True}


def on_chats(adapters: dict[str, Any]) -> dict[str, Any]:
    """The same on conversations in `--data_path`/my_chats (docs/vision_language.md)."""
    chats = {"chats": {"path": "my_chats", "chat": True}}
    return override(adapters, {"data.sources": chats, "data.rules": {"too_long": "drop"}})


SMOLVLM_256M = adapters_on("HuggingFaceTB/SmolVLM-256M-Instruct", 2048, 20, **_SMOLVLM)

GROUPS = {
    "idefics2_8b": [
        adapters_on(
            "HuggingFaceM4/idefics2-8b", 1024, 8, style="idefics2", frame_size=980, image_tokens=64, max_size=980
        )
    ],
    "idefics3_8b": [
        adapters_on(
            "HuggingFaceM4/Idefics3-8B-Llama3", 4096, 20, frame_size=364, image_tokens=169, max_size=1456, enlarge=True
        )
    ],
    "smolvlm_256m": [SMOLVLM_256M],
    "smolvlm_256m_chat": [on_chats(SMOLVLM_256M)],
    "smolvlm2_256m": [adapters_on("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", 2048, 20, **_SMOLVLM)],
    "interleaved_chat_tiny": [INTERLEAVED_CHAT_TINY],
    "interleaved_photographs": [INTERLEAVED_PHOTOGRAPHS],
    "interleaved_tiny": [INTERLEAVED_TINY],
    "interleaved_tiny_seeds": grid(INTERLEAVED_TINY, {"seed": [1, 2, 3]}),
    "smollm2_digits": seeds([SMOLLM2_DIGITS], 5),
}
