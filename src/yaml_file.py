"""Reads a YAML file that holds a dict; a mistake is named with its line."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from src.errors import ConfigError
from src.files import reading


def read(path: Path, expected: str) -> dict[str, Any]:
    """The dict in the file `path`. expected: what it should hold, for the message.

    Raises:
        ConfigError: it cannot be read, is no YAML, has a key twice, or is no dict; names the file, and the line if one is to blame.
    """
    try:
        with reading(path, ConfigError):
            raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected {expected}, got {type(raw).__name__}.")
    return raw


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would take the last and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)
