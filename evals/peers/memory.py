"""A limit on the memory of one program and its page cache: a control group of Linux, of either version.

What a program reads through the page cache is charged to it, unless it was in the cache already: `evict` takes the
files out first, and says where that failed.

    with MemoryGroup(limit_bytes=2_600_000_000) as group:
        subprocess.run(command, preexec_fn=group.enter)
        group.peak_bytes(), group.killed()
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from engine.errors import UserError, error

_ROOT = Path("/sys/fs/cgroup")
_CACHED_SHARE = 0.02


class MemoryGroup:
    """Made on entry, removed on exit, when no process is in it. limit_bytes: None only watches."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self._second = (_ROOT / "cgroup.controllers").is_file()  # version 2
        self._folder = (
            _ROOT if self._second else _ROOT / "memory" / _own_group()
        ) / f"expertmiss-{uuid.uuid4().hex[:8]}"

    def __enter__(self) -> MemoryGroup:
        """UserError where this process may not, or the system has none."""
        try:
            self._folder.mkdir()
            if self.limit_bytes is not None:
                self._limit(self.limit_bytes)
        except OSError as exc:
            self.__exit__()
            raise error(
                f"no memory control group ({exc.strerror})",
                "Linux with memory control groups, as root",
                "run it as root, or give the container its own groups",
            ) from None
        return self

    def _limit(self, limit_bytes: int) -> None:
        if self._second:
            self._write("memory.max", limit_bytes)
            with contextlib.suppress(OSError):  # a system without swap
                self._write("memory.swap.max", 0)
            return
        self._write("memory.limit_in_bytes", limit_bytes)
        with contextlib.suppress(OSError):
            self._write("memory.memsw.limit_in_bytes", limit_bytes)

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(str(value))

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def enter(self) -> None:
        """The calling process is in the group from now on; for preexec_fn."""
        self._write("cgroup.procs", os.getpid())

    def peak_bytes(self) -> int | None:
        """The most that was charged at once, page cache included; None where the system does not say."""
        try:
            name = "memory.peak" if self._second else "memory.max_usage_in_bytes"
            return int((self._folder / name).read_text())
        except OSError:
            return None

    def killed(self) -> bool:
        """Whether the system ended a process for want of memory."""
        name = "memory.events" if self._second else "memory.oom_control"
        found = re.search(r"^oom_kill (\d+)$", (self._folder / name).read_text(), re.MULTILINE)
        return bool(found and int(found[1]))


def _own_group() -> str:
    """Of the memory controller of version 1, the group that this process is in."""
    with contextlib.suppress(OSError):
        found = re.search(
            r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE
        )
        if found and (_ROOT / "memory" / found[1]).is_dir():
            return found[1]
    return ""


@contextlib.contextmanager
def read_ahead(path: str | Path, kb: int | None) -> Iterator[None]:
    """The device of a file reads so far ahead within the block, None: as it does; afterwards as before.

    What maps a file waits for all that its faults read ahead. 128 KB is the kernel's own default; machines are found
    with sixty times that. UserError where it cannot be set.
    """
    if kb is None:
        yield
        return
    setting = _read_ahead_of(path)
    try:
        before = setting.read_text()
        setting.write_text(str(kb))
    except OSError as exc:
        found = f"read-ahead of {path} cannot be set ({setting}: {exc.strerror})"
        raise error(found, "a block device, as root", "leave read_ahead_kb of the row at '-'") from None
    try:
        yield
    finally:
        setting.write_text(before)


def read_ahead_kb(path: str | Path) -> int | None:
    """As the machine has it; None where it does not say."""
    try:
        return int(_read_ahead_of(path).read_text())
    except (OSError, ValueError):
        return None


def _read_ahead_of(path: str | Path) -> Path:
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return next(
        (d / "queue/read_ahead_kb" for d in (device, device.parent) if (d / "queue").is_dir()), device / "queue"
    )


def evict(paths: Iterable[str | Path]) -> None:
    """Take files out of the page cache. UserError where much of one stays: somebody else has it mapped."""
    for path in paths:
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            share = cached_share(handle.fileno())
        if share > _CACHED_SHARE:
            raise error(
                f"{path}: {share:.0%} stay in the page cache", "a file that nobody has open", "end what reads it"
            )


def cached_share(handle: int) -> float:
    """Of the pages of an open file, how many are in the page cache (mincore)."""
    size = os.fstat(handle).st_size
    if not size:
        return 0.0
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with mmap.mmap(handle, size, access=mmap.ACCESS_COPY) as memory:
        start = ctypes.c_char.from_buffer(memory)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages
        )
        del start
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return sum(page & 1 for page in pages) / len(pages)


def evict_libraries(packages: Iterable[str]) -> None:
    """Of Python packages that nobody has imported the shared libraries, as far as nobody else has them mapped."""
    import importlib.util

    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or [] if spec else []:
            for path in Path(folder).rglob("*.so*"):
                with contextlib.suppress(UserError, OSError):
                    evict([path])
