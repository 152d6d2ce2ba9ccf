"""The commands that prepare data."""

from src import missing_package  # noqa: F401  before any other import
