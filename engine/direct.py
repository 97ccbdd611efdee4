"""How is a file read past the page cache? One descriptor and one read, for every store that keeps experts on disk.

`O_DIRECT` asks that offset, length and memory are multiples of `engine.record.PAGE`. Filesystems that live in memory
have no disk to go to, though recent kernels accept the flag there: they are read as ordinary files and named `cached`,
as is every file that cannot be opened with the flag.

    fd, cached = open_direct(path)
    read_pages(fd, buffer, offset=8192, needed=5000, path=path)  # buffer [8192], page-aligned
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from engine.errors import error
from engine.host_facts import MEMORY_FILESYSTEMS, filesystem
from engine.record import PAGE


def open_direct(path: Path, flags: int = os.O_RDONLY) -> tuple[int, bool]:
    """(descriptor, cached): cached is True where reads may be answered by the page cache."""
    if hasattr(os, "O_DIRECT") and filesystem(path.resolve().parent) not in MEMORY_FILESYSTEMS:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), False
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # what a filesystem without O_DIRECT says
                raise
    return os.open(path, flags, 0o666), True


def read_pages(fd: int, buffer: memoryview, offset: int, needed: int, path: Path) -> int:
    """Fill `buffer` from `offset`, both whole pages; returns the bytes read, at least `needed` of them.

    The last page of a file ends where the file does: fewer bytes than the buffer holds are no error, fewer than
    `needed` are. A read that a signal cut short goes on at the last whole page.
    """
    done = 0
    while True:
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if done + count >= needed:
            return done + count
        if count < PAGE:
            size = os.fstat(fd).st_size
            raise error(f"{path} ends at byte {size:,}", f"at least {offset + needed:,}", "fetch it again")
        done += count // PAGE * PAGE
