"""The places of a model without data."""

from tests.core.models.conftest import places  # noqa: F401
