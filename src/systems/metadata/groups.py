"""Language models on documents with metadata."""

from typing import Any

from src.experiments.grid import override, seeds

# Pieces of the standard library's documentation (python -m data_prep.metadata.stdlib_pages). Half of them have their
# HTML and, with probability 0.5 each, address and title. Layout tags are dropped, and links, which split sentences.
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
                "exclude": [{"tag": tag} for tag in ("a", "body", "dl", "font", "small", "table", "td", "tr")],
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

# BigScience's metadata project (github.com/bigscience-workshop/metadata, hydra_configs/v2.yaml and
# deepspeed_configs/v2.json), with the reference's order and tokens. The corpus is
# bs-modeling-metadata/c4-en-html-with-metadata, which data_prep.metadata.prepare reads. html_rate 0.25 is the written
# rate: 13 % of the documents have HTML. The reference inverts it and has HTML in 87 %: without it, weights give 51 %.
STARTS = {"html": "<HTML>", "entity_paragraph": "<ENTITY_CHAIN>"}
ENDS = {"html": "</HTML>", "entity_paragraph": " </ENTITY_CHAIN> "}
WEIGHTS = {
    "html": 1.0,
    "timestamp": 11.335125448028673,
    "website_desc": 10.532889258950874,
    "title": 1.0657717366883845,
    "generation_datasource": 1.0,
    "entity_paragraph": 1.028817740667444,
    "generation_length_text": 1.0,
}
GPT2_XL_V2: dict[str, Any] = {
    "recipe": "metadata_lm",
    "seed": 42,
    "model": {"name": "hf", "path": "openai-community/gpt2-xl", "extra_tokens": [*STARTS.values(), *ENDS.values()]},
    "data": {
        "name": "metadata",
        "corpus": "c4_html",
        "columns": list(WEIGHTS),
        "sequence_tokens": 1024,
        "probability": 0.5,
        "sampling": "weighted",
        "weights": WEIGHTS,
        "html_rate": 0.25,
        "metadata_loss": True,
        "end_token": False,
        "val_documents": 1024,
        "writing": {
            "linearisation": "compatible",
            "keys": [
                "html",
                "timestamp",
                "website_description",
                "title",
                "url",
                "datasource",
                "length",
                "entity_paragraph",
            ],
            "list_local_keys": True,
            "local_key_names": {"entity_paragraph": "entity"},
            "html": {
                "attributes": ["class", "id"],
                "max_length": 0,
                "exceptions": ["table", "tr", "th", "td", "colgroup", "thead", "tfoot", "tbody"],
                "exclude": [{"tag": "body", "min_length": 0}],
            },
            "special_tokens": True,
            "run_starts": STARTS,
            "run_ends": ENDS,
        },
    },
    "loop": {
        "steps": 100_000,
        "sequences_per_step": 256,
        "micro_batch": 8,
        "learning_rate": 1e-4,
        "schedule": "linear",
        "warmup_rate": 0.06,
        "weight_decay": 0.01,
        "adam_beta2": 0.98,
        "precision": "float16",
        "eval_every": 2_000,
        "extra_eval_steps": [2],
    },
    "gains": {"columns": list(WEIGHTS), "documents": 1_500, "prompt": True},
}

# Metadata conditioning then cooldown (Gao et al. 2025, arXiv 2501.01956): 90 % of the steps with the address before
# each document, the rest without. The baseline never has metadata. Both are evaluated without.
HOST = {"url": "host", "keys": ["url"], "separators": {"prefix_end": "\n\n"}}
MECO: dict[str, Any] = {
    "recipe": "metadata_lm",
    "seed": 0,
    "model": {
        "name": "gpt_bigcode",
        "tokenizer": "llama3_tokenizer",
        "hidden_size": 2048,
        "num_layers": 24,
        "num_heads": 16,
        "max_positions": 8192,
    },
    "data": {
        "name": "metadata",
        "corpus": "dclm_pages",
        "sequence_tokens": 8192,
        "open_rows": 64,
        "columns": ["url"],
        "writing": HOST,
    },
    "loop": {
        "steps": 40_000,
        "sequences_per_step": 512,
        "micro_batch": 4,
        "learning_rate": 3e-3,
        "schedule": "cosine",
        "warmup_rate": 0.05,
        "final_rate": 0.1,
        "weight_decay": 0.033,
        "adam_beta2": 0.95,
        "precision": "bfloat16",
        "eval_every": 2_000,
    },
}


def conditioned_then_cooled(experiment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the experiment with metadata in 90 % of its steps, and a baseline without."""
    plain = {**experiment["data"], "columns": []}
    phases = [{"data": experiment["data"], "until": 0.9}, {"data": plain}]
    return [override(experiment, {"data": {"name": "phases", "phases": phases}}), override(experiment, {"data": plain})]


TINY_ADDRESSES = override(
    METADATA_TINY,
    {
        "data": {
            "name": "metadata",
            "corpus": "stdlib_pages",
            "sequence_tokens": 320,
            "open_rows": 8,
            "columns": ["url", "title"],
            "writing": {"keys": ["url", "title"]},
            "val_documents": 300,
        },
        "loop.extra_eval_steps": [540],
        "gains": None,
    },
)

# SmolLM2-135M (`make smollm2`) on the same pieces: adapters that learn to use metadata, and some that never see any.
SMOLLM2_METADATA = override(
    METADATA_TINY,
    {
        "model": {
            "name": "lora",
            "rank": 16,
            "alpha": 32.0,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "base": {"name": "hf", "path": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "bfloat16"},
        },
        "data.sequence_tokens": 384,
        "data.val_documents": 100,
        "loop.steps": 120,
        "loop.learning_rate": 5e-4,
        "loop.precision": "bfloat16",
        "loop.eval_every": 60,
        "gains.documents": 100,
    },
)
SMOLLM2_PLAIN = override(SMOLLM2_METADATA, {"data.probability": 0.0})

GROUPS = {
    "metadata_tiny": [METADATA_TINY],
    "metadata_gpt2xl_v2": [GPT2_XL_V2],
    "metadata_meco": conditioned_then_cooled(MECO),
    "metadata_meco_tiny": conditioned_then_cooled(TINY_ADDRESSES),
    "smollm2_metadata": seeds([SMOLLM2_METADATA], 3),
    "smollm2_metadata_control": seeds([SMOLLM2_PLAIN], 3),
}
