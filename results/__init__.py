"""The commands that read runs."""

from src import missing_package  # noqa: F401  before any other import
