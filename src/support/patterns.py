"""Linear-time regular expressions (RE2), however repetitions are nested.

Python's own can take for ever, on what a model writes or a user types: `(a+)+b` on thirty letters a. RE2 has all but
what needs a way back
in the text: no lookahead, lookbehind or references to groups. Its `\\d`, `\\w` and `\\b` know ASCII alone, and `$` is
the very end.
"""

import re
from typing import Any

_NEEDS_A_WAY_BACK = re.compile(r"\(\?<?[=!]|\(\?P=|\\[1-9]")


def compile_pattern(pattern: str, dot_is_any: bool = False) -> Any:
    """A compiled pattern with `search` and `fullmatch`. dot_is_any: whether `.` is a new line, too.

    Raises:
        ValueError: it is no regular expression, or one that RE2 does not have; says why.
    """
    import re2

    options = re2.Options()
    options.dot_nl, options.log_errors = dot_is_any, False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error.args[0])
        advice = " It has no lookahead, lookbehind or references." if _NEEDS_A_WAY_BACK.search(pattern) else ""
        raise ValueError(f"{pattern!r} is no regular expression of RE2: {why}.{advice}") from None
