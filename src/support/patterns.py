"""Linear-time regular expressions (RE2).

Python's `re` can take exponential time on model outputs or user input: `(a+)+b` on thirty letters a. RE2 has everything
except features that need backtracking: no lookahead, lookbehind or back-references. Its `\\d`, `\\w` and `\\b` match
only ASCII, and `$` matches only at the end.
"""

import re
from typing import Any

_NEEDS_A_WAY_BACK = re.compile(r"\(\?<?[=!]|\(\?P=|\\[1-9]")


def compile_pattern(pattern: str, dot_is_any: bool = False) -> Any:
    """A compiled pattern with `search` and `fullmatch`. dot_is_any: whether `.` also matches a newline.

    Raises:
        ValueError: it is not a regular expression that RE2 supports; gives the reason.
    """
    import re2

    options = re2.Options()
    options.dot_nl, options.log_errors = dot_is_any, False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error.args[0])
        advice = " RE2 has no lookahead, lookbehind or back-references." if _NEEDS_A_WAY_BACK.search(pattern) else ""
        raise ValueError(f"{pattern!r} is not a valid RE2 expression: {why}.{advice}") from None
