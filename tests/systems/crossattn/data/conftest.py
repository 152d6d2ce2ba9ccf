"""What every test of questions begins with."""

from collections.abc import Iterator

import pytest

from src.systems.crossattn.data import questions


@pytest.fixture(autouse=True)
def _new_counters() -> Iterator[None]:
    """Contexts that lose their end are counted by process."""
    questions.truncation_counter.cache_clear()
    yield
    questions.truncation_counter.cache_clear()
