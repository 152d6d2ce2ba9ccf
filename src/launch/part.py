"""A launcher as its config and the functions of its module."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from src.config import Config
from src.registry import LAUNCHERS, bind, name_of, resolved


@dataclass(frozen=True)
class Part:
    """A launcher, bound to its checked config. Calling it submits."""

    config: Config

    @property
    def name(self) -> str:
        return name_of(self.config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module(type(self.config).__module__).submit(self.config, *args, **kwargs)

    def function(self, name: str) -> Callable[..., Any] | None:
        found = getattr(import_module(type(self.config).__module__), name, None)
        return partial(found, self.config) if found else None

    def ask(self, name: str, *args: Any) -> Any:
        found = self.function(name)
        return found and found(*args)


def bind_launcher(raw: Any) -> Part:
    return Part(bind(LAUNCHERS, raw, key="launcher"))


def resolved_launcher(part: Part) -> dict[str, Any]:
    return resolved(part.config, key="launcher")
