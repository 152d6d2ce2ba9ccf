"""Fixtures of the core's tests that tests of the systems share."""

from tests.core.data.conftest import make_tokenizer, places, tokenizer, write_corpus  # noqa: F401
from tests.core.models.conftest import base_of, batch, make  # noqa: F401
