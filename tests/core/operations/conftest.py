"""The finished runs of the tests of results."""

from tests.results.conftest import finished, runs  # noqa: F401
