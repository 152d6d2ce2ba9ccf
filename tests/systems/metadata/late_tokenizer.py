"""A model whose tokenizer is unknown before it is built, as for a registered model without `tokenizer_folder`."""

from typing import Any

from src.experiments.config import Places
from src.models import gpt_bigcode


class Config(gpt_bigcode.Config):
    """As `gpt_bigcode`."""

    def tokenizer_folder(self, places: Places) -> Any:
        """None: unknown."""
        del places
