"""What a training reads and does not make, by fingerprint: it must not change between the starts of a run."""

import hashlib
from typing import Any

from src.runs import parents as references
from src.runs.context import Run


def fingerprints(run: Run, data: Any, tokenizer: Any, pretrained: str | None) -> dict[str, str]:
    """{"data": …, "tokenizer": …, "parent <id>/last": …, "pretrained model": …} by digest.

    `data` has a `fingerprint`; `tokenizer` is a fast tokenizer; `pretrained` is the fingerprint of a model from elsewhere, if any;
    a parent's is that of its trained weights and its tokenizer.
    """
    parents = references.fingerprints(run.dir.exp, run.places.runs)
    return {
        **({"pretrained model": pretrained} if pretrained else {}),
        "data": data.fingerprint,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        **{f"parent {name}": digest for name, digest in parents.items()},
    }
