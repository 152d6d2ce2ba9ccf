"""The finished runs of the tests of results."""

from tests.results.conftest import demo_runs, finished, runs  # noqa: F401
