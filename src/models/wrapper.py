"""Base class of models around a transformers model."""

from typing import Any

from torch import nn


class Wrapper(nn.Module):
    """A model around `base`, whose config and tokenizer are its own."""

    base: Any
    """A transformers model, whose classes are of no use to a type checker."""

    @property
    def config(self) -> Any:
        """The base's transformers config."""
        return self.base.config

    @property
    def name_or_path(self) -> str:
        """Where the tokenizer is loaded from."""
        return str(self.base.name_or_path)

    @name_or_path.setter
    def name_or_path(self, value: str) -> None:
        self.base.name_or_path = value
