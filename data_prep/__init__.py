"""Commands that prepare data."""

from src.support import missing_package  # noqa: F401  before any other import
