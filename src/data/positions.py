"""Whether the sequences of a data set fit the positions of a model."""

from src.errors import ConfigError


def require_fit(field: str, tokens: int, max_positions: int | None) -> None:
    """Raises ConfigError where `field` allows more tokens than a model has positions (None: unknown)."""
    if max_positions is not None and tokens > max_positions:
        raise ConfigError(f"{field}: {tokens} tokens are more than the {max_positions} positions of the model.")
