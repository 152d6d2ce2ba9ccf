"""Cache component method calls inside a `with` block.

A dry run over a thousand experiments then checks each model and each data set once, not a thousand times.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from src.experiments.config import Places

P = ParamSpec("P")
R = TypeVar("R")
_results: dict[Any, Any] | None = None


@contextlib.contextmanager
def remember_calls() -> Iterator[None]:
    """Within the block, `call_once` calls each method of equal components once.
    The files that they read must not change meanwhile."""
    global _results  # noqa: PLW0603  a cache of one block, not of the process
    _results = {}
    try:
        yield
    finally:
        _results = None


def call_once(method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`method(*args)` of a component; within `remember_calls`, the cached result of an equal component."""
    component = getattr(method, "__self__", None)
    assert component is not None, "a method of a component"
    key = (type(component), component, method.__name__, tuple(id(a) if isinstance(a, Places) else a for a in args))
    try:
        hash(key)
    except TypeError:  # a config that contains a list cannot be hashed
        return method(*args, **kwargs)
    if _results is None or kwargs:
        return method(*args, **kwargs)
    if key not in _results:
        # Stores the arguments too, so that no other object can get their ids.
        _results[key] = (args, method(*args, **kwargs))
    return _results[key][1]
