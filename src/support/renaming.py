"""Rename a folder over another: atomically if the system supports it, else in two steps."""

import errno
import os
from pathlib import Path

# Errors of flock and renameat2 if the file system or the kernel does not support them.
NOT_OFFERED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.ENOLCK}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def rename_over(source: Path, final: Path) -> Path | None:
    """Rename the folder `source` to `final`; return the new path of an older `final`, if any."""
    try:
        os.rename(source, final)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
    else:
        return None
    if _exchange(source, final):
        return source
    old = source.with_name(f"{source.name}.old")
    try:
        os.rename(final, old)
        os.rename(source, final)
    except BaseException:
        if not final.exists():
            os.rename(old, final)
        raise
    return old


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically, with renameat2(2); False if that is not supported."""
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_OFFERED:
        return False
    raise OSError(number, os.strerror(number), str(second))
