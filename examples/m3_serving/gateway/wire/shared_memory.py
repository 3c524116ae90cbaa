"""Payloads in files of a memory file system, instead of on the wire.

The sender writes a request's items one after the other into a new file and names it in its message;
the worker copies them out and removes the file. The sender removes it too when the call is over,
whichever way. If both die in between, the file's name says whose it was, and `sweep`, which both
run at their start and from time to time, removes those whose owner is gone.

Files are read and written, not mapped: a full file system is then an error (and the sender uses the
wire instead), where a mapping would end the process with a signal; and what was checked cannot
change afterwards.
"""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

DEFAULT_DIRECTORY = "/dev/shm"

_PREFIX = "m3s"
# Whose file: namespace of process ids, process id, when that process started.
_NAME = re.compile(rf"{_PREFIX}-(\d{{1,20}})-(\d{{1,10}})-(\d{{1,20}})-([0-9a-f]{{16}})")


def _namespace() -> int:
    """Numbers of processes mean something only within one of these."""
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int | None:
    """Start of a process in clock ticks after boot; None if there is no such process.

    Together with the number it names a process for good: numbers are used again.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(line.rsplit(b")", 1)[1].split()[19])


def identity(directory: str) -> str:
    """Equal for two processes exactly if they can use the same directory for this.

    That is: the same kernel, the same mounted file system, the same folder in it, the same user.
    Empty if there is no such directory.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        status = os.stat(directory)
    except OSError:
        return ""
    return f"{boot}:{status.st_dev}:{status.st_ino}:{os.geteuid()}"


def is_name(name: str) -> bool:
    """Whether a file could be one of these; such a name has no slash and no dots."""
    return _NAME.fullmatch(name) is not None


def new_name() -> str:
    """A name nobody has, of a file that belongs to this process."""
    pid = os.getpid()
    return f"{_PREFIX}-{_namespace()}-{pid}-{_started(pid)}-{secrets.token_hex(8)}"


def write(directory: str, name: str, parts: Sequence[memoryview]) -> None:
    """Writes a new file; OSError, and no file, if there is no room.

    Args:
        directory: of a memory file system.
        name: of `new_name`.
        parts: bytes, one after the other.
    """
    path = os.path.join(directory, name)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for part in parts:
            rest = part.cast("B")
            while len(rest):
                rest = rest[os.write(file, rest) :]
    except BaseException:
        remove(directory, name)
        raise
    finally:
        os.close(file)


def read_into(directory: str, name: str, offset: int, out: memoryview) -> None:
    """Fills `out` from a file.

    Raises:
        ValueError: no name of ours, no regular file of this user, or too short.
        OSError: it cannot be opened, for instance because it is gone.
    """
    if not is_name(name):
        raise ValueError(f"the name must be one of ours, got {name[:100]!r}")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(os.path.join(directory, name), flags)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("the name must be that of a regular file of this user")
        if status.st_size < offset + len(out):
            raise ValueError(f"the file must have {offset + len(out)} bytes, got {status.st_size}")
        while len(out):
            count = os.preadv(file, [out], offset)
            if count == 0:
                raise ValueError("the file became shorter")
            offset, out = offset + count, out[count:]
    finally:
        os.close(file)


def remove(directory: str, name: str) -> None:
    """Removes a file, if it is still there; a name that is not ours is left alone."""
    if is_name(name):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))


def sweep(directory: str) -> list[str]:
    """Removes files whose owner is gone; returns their names.

    Files of processes in another namespace are left to those who can see them.
    """
    removed = []
    namespace = _namespace()
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) != namespace:
            continue
        if _started(int(match[2])) == int(match[3]):
            continue
        with contextlib.suppress(OSError):  # another sweeper was first, or another user's
            remove(directory, name)
            removed.append(name)
    return removed
