"""Silence lines of libraries that say nothing to users, before the libraries are imported."""

import logging
import os
import sys


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record of DeepSpeed is more than the remark that this machine has no GPU."""
    return not str(record.msg).startswith("Setting accelerator to CPU.")


logging.getLogger("DeepSpeed").addFilter(_is_news)  # it writes to standard output, as transformers saves a model
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of transformers and others would fill a log
