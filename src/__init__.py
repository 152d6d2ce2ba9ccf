"""All that trains."""

from src.support import library_output, missing_package  # noqa: F401  before any other import
