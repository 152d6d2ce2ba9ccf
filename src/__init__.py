"""All that trains."""

from src import missing_package  # noqa: F401  before any other import
