"""The end of a file that several processes append lines to: each line whole or not at all."""

import errno
import os


def append_line(descriptor: int, line: bytes) -> None:
    """Add `line`, which ends with a newline, to a file opened with O_RDWR and O_APPEND and locked; it is on the disk when this returns.

    It begins a line of its own, also after one that a killed writer left half written.

    Raises:
        OSError: the disk refuses. The file holds what it held before.
    """
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line
    written = os.write(descriptor, line)
    try:
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
