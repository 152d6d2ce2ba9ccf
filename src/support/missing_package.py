"""Report a missing package in one line, with the environment to activate."""

import sys
from types import TracebackType

_before = sys.excepthook
_OURS = ("src", "results", "data_prep", "benchmarks", "exp_configs", "job_configs")


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name and name not in _OURS:
        activate = "With a .venv from `make`: source .venv/bin/activate. Else: pip install -r requirements.txt"
        sys.stderr.write(f"error: the package {name!r} is not installed for {sys.executable}. {activate}\n")
    else:
        _before(kind, error, trace)


sys.excepthook = _explain
