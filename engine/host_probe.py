"""The probe: how fast this machine reads, copies and computes, measured as the engine does it, in under a minute.

disk      random aligned O_DIRECT reads of a file of random bytes that the probe writes and that is already
          unlinked while it is read, by the engine's own readers, into page-aligned memory
memory    torch copies between pools larger than any cache
pcie      pinned host memory to the GPU on a side stream, where there is one
compute   engine.host_compute; then compute beside each link, for what they lose to one another

measure(Path("~/models"), threads=8)     # facts, probe, compute and links of a profile
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import psutil
import torch
import yaml

from engine.errors import error
from engine.files import write_text
from engine.host_compute import SEED, measure_compute
from engine.host_facts import MEMORY_FILESYSTEMS, filesystem, fingerprint, machine_facts, software_facts
from engine.host_sample import number, other_cores, rounded, sample, spreads, table
from engine.host_times import SDCARD
from engine.readers import Readers
from engine.record import PAGE

BESIDE_BYTES = 4_194_304  # record that keeps a link busy beside compute
NOISY_SPREAD, NOISY_SHARE, HOPELESS_SPREAD = 0.5, 0.1, 20.0  # of a full probe: the machine was busy
SHARED_CORES = 0.25  # a thread may lose so much of its core
LIMIT_MARGIN = 1.5  # a limit over the best it measured: a virtual disk has better days, the page cache is far beyond
SDCARD_LINK = {
    "kind": "disk",
    "of": "disk",
    "latency_s": SDCARD.overhead_s,
    "bandwidth_bytes_per_s": SDCARD.bytes_per_s,
}

FULL = {
    "records": (16_384, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216),
    "depths": (1, 2, 4, 8),
    "file_bytes": 1 << 29,
    "pool_bytes": 1 << 28,
    "experts": ((256, 32), (512, 256), (2048, 512), (2048, 1024)),  # (D, F)
    "widths": (256, 1024, 2048),
    "depth_layers": (2, 4),
    "seconds": {"disk": 12.0, "memory": 2.5, "pcie": 2.5, "decode": 5.0, "experts": 4.0, "beside": 1.2},
    "repeats": 5,
}
QUICK = {
    "records": (65_536, 1_048_576, 4_194_304),
    "depths": (1, 4),
    "file_bytes": 1 << 26,
    "pool_bytes": 1 << 26,
    "experts": ((256, 32), (512, 256)),
    "widths": (128, 512),
    "depth_layers": (1, 2),
    "seconds": {"disk": 0.5, "memory": 0.2, "pcie": 0.2, "decode": 0.3, "experts": 0.2, "beside": 0.1},
    "repeats": 3,
}

Batch = Callable[[int, int], float]  # (bytes of a record, records begun together) -> seconds until all are done


def write_profile(
    name: str,
    path: Path,
    *,
    folder: str | None = None,
    threads: int | None = None,
    quick: bool = False,
    check: Callable[[object, Path], object],
) -> None:
    """Measure this machine and write its profile to `path`. What could not be written is refused before measuring.

    Throttled links that someone added to the profile are kept. folder: on the disk to measure, None is the cache;
    threads: None is all logical cores; check: raises where the profile is not one (engine.host.parse_host).
    """
    mark = fingerprint()
    kept = _throttles_to_keep(path, mark)
    cache = Path(os.environ.get("EXPERTMISS_CACHE", "~/.cache/expertmiss")).expanduser()
    parts = measure(Path(folder) if folder else cache, threads or psutil.cpu_count(), quick)
    profile = {"id": name, "status": "measured", "fingerprint": mark}
    profile |= parts | {"facts": machine_facts() | parts["facts"], "links": parts["links"] | kept}
    text = yaml.safe_dump(profile, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    check(yaml.safe_load(text), path)
    write_text(path, text)


def _throttles_to_keep(path: Path, mark: str) -> dict:
    """Raise UserError where `path` is another machine's, or this machine has another file beside it."""
    for other in sorted(path.parent.glob("*.yaml")):
        try:
            data = yaml.safe_load(other.read_text(encoding="utf-8"))
        except yaml.YAMLError as exc:
            raise error(f"{other}: {exc}", "valid YAML", "mend the file, or remove it") from None
        held = data.get("fingerprint") if isinstance(data, dict) else None
        if other == path and held != mark:
            raise error(
                f"{path} is the profile of another machine ({held or 'no fingerprint'})",
                f"a new file, or one with fingerprint {mark}",
                "choose another --id",
            )
        if other == path:
            return {name: link for name, link in data.get("links", {}).items() if "of" in link}
        if held == mark:
            raise error(
                f"this machine is already '{other.stem}' ({other})", "one profile a machine", f"--id {other.stem}"
            )
    return {}


def measure(folder: Path, threads: int, quick: bool = False) -> dict:
    """facts, probe, compute and links of a profile. UserError where the disk cannot be measured honestly."""
    plan, start = (QUICK if quick else FULL), time.perf_counter()
    others = other_cores()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - start:5.1f} s] {line}", file=sys.stderr, flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), _disk(folder, plan, say) as disk:
            batches: dict[str, Batch] = {"disk": disk, "memory": _memory(plan["pool_bytes"])}
            if device == "cuda":
                batches["pcie"] = _pcie(plan["pool_bytes"])
            links = {}
            for kind, batch in batches.items():
                say(f"{kind}: {len(plan['records'])} record sizes, {len(plan['depths'])} depths")
                links[kind] = {"kind": kind} | _measure_link(batch, plan, kind)
            if _cached_share(disk.fd, plan["file_bytes"]) > 0.01:
                raise error(
                    f"{folder}: the page cache holds what O_DIRECT read",
                    "reads that bypass it (`cached` is not accepted)",
                    "the filesystem ignores O_DIRECT: choose another --dir",
                )
            compute, busy = measure_compute(device, threads, plan, say)
            for kind, batch in batches.items():
                say(f"{kind} beside compute")
                links[kind]["slowdown"] = _beside(busy, batch, plan)
    finally:
        torch.set_num_threads(before)
    busy_cores = rounded(others())
    say(f"other work took {busy_cores:.2g} of {psutil.cpu_count()} cores")
    if not quick:
        _check_quiet([compute, links], busy_cores, threads, psutil.cpu_count())
    best = links["disk"]["limit_bytes_per_s"] / LIMIT_MARGIN
    if best > SDCARD.bytes_per_s:
        links["sdcard"] = SDCARD_LINK
    seconds = time.perf_counter() - start
    say("done")
    return {
        "facts": software_facts(folder),
        "probe": {
            "quick": quick,
            "seconds": rounded(seconds),
            "file_bytes": plan["file_bytes"],
            "other_cores": busy_cores,
        },
        "compute": {device: compute},
        "links": links,
    }


def _check_quiet(parts: object, other_cores: float, threads: int, cores: int) -> None:
    """Raise UserError where other work took the processor away: waiting threads then cost a hundredfold."""
    if threads + other_cores > cores + SHARED_CORES:
        raise error(
            f"{threads} threads were measured while other work kept {other_cores:.2g} of {cores} cores busy",
            "a core for every thread",
            "stop what else runs, or lower --threads to the cores that are free",
        )
    found = np.array(list(spreads(parts)))
    noisy = (found > NOISY_SPREAD).mean()
    if noisy > NOISY_SHARE or found.max() > HOPELESS_SPREAD:
        raise error(
            f"{noisy:.1%} of the measured cells spread by more than half their median",
            f"at most {NOISY_SHARE:.0%}, as on an idle machine",
            "stop what else runs, or lower --threads to the cores that are free",
        )


# ---- links ----------------------------------------------------------------------------------------------------------
def _measure_link(batch: Batch, plan: dict, kind: str) -> dict:
    sizes = [size for size in plan["records"] if size * max(plan["depths"]) <= plan["pool_bytes"]]
    cells = {(size, n): lambda size=size, n=n: batch(size, n) for size in sizes for n in plan["depths"]}
    found = sample(cells, plan["seconds"][kind], plan["repeats"])
    best = max(size * n / np.median(values) for (size, n), values in found.items())
    return {"limit_bytes_per_s": rounded(LIMIT_MARGIN * best)} | table(found, plan["depths"])


class _Disk:
    """Batches of random reads from an unlinked file. Called with (bytes, count); `count` reads are in flight."""

    def __init__(self, fd: int, size: int, deepest: int, largest: int) -> None:
        self.fd, self.size = fd, size
        self.readers = Readers(deepest)
        self.buffers = [memoryview(mmap.mmap(-1, largest)) for _ in range(deepest)]  # page-aligned
        self.rng = np.random.default_rng(SEED)

    def __call__(self, size: int, count: int) -> float:
        offsets = (self.rng.integers(0, (self.size - size) // PAGE + 1, count) * PAGE).tolist()
        places = [(buffer[:size], offset) for buffer, offset in zip(self.buffers, offsets, strict=False)]
        start = time.perf_counter()
        self.readers.read_all(self._read, places)
        return time.perf_counter() - start

    def _read(self, place: tuple[memoryview, int]) -> None:
        target, offset = place
        if (size := os.preadv(self.fd, [target], offset)) != len(target):
            raise OSError(f"a short read from the probe's file: {size} of {len(target)} bytes")


@contextmanager
def _disk(folder: Path, plan: dict, say: Callable[[str], None]) -> Iterator[_Disk]:
    """Write the file with O_DIRECT, unlink it at once (nothing is left behind, however the probe ends), read it."""
    size, block = plan["file_bytes"], 8 << 20
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise error(f"{folder}: {exc.strerror}", "a folder that can be written", "choose another --dir") from None
    kind = filesystem(folder)
    cure = "put --dir on a local disk (ext4, xfs, btrfs); `cached` is not accepted"
    if not hasattr(os, "O_DIRECT") or kind in MEMORY_FILESYSTEMS:
        found = f"{folder} is on {kind}" if hasattr(os, "O_DIRECT") else f"{platform.system()} has no O_DIRECT"
        raise error(found, "a disk that is read past the page cache (O_DIRECT)", cure)
    if (free := shutil.disk_usage(folder).free) < 2 * size:
        raise error(f"{free:,} bytes free in {folder}", f"{2 * size:,} for the probe's file", "choose another --dir")
    path = folder / f"expertmiss-probe-{os.getpid()}.bin"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as exc:
        path.unlink(missing_ok=True)
        raise error(
            f"{folder}: no file with O_DIRECT ({exc.strerror})", "a disk read past the page cache", cure
        ) from None
    path.unlink()
    disk = None
    try:
        say(f"disk: writing {size >> 20} MiB of random bytes")
        rng, buffer = np.random.default_rng(SEED), mmap.mmap(-1, block)
        for offset in range(0, size, block):
            buffer[:] = rng.bytes(block)
            os.pwritev(fd, [buffer], offset)
        os.fsync(fd)
        disk = _Disk(fd, size, max(plan["depths"]), max(plan["records"]))
        yield disk
    finally:
        if disk:
            disk.readers.close()
        os.close(fd)


def _cached_share(fd: int, size: int) -> float:
    """Share of a file's pages that the page cache holds, as mincore(2) tells."""
    with mmap.mmap(fd, size) as view:
        window = ctypes.c_char.from_buffer(view)
        pages = (ctypes.c_ubyte * (size // PAGE))()
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(window)), ctypes.c_size_t(size), pages
        )
        del window
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return float((np.frombuffer(pages, np.uint8) & 1).mean())


def _memory(pool_bytes: int) -> Batch:
    source = torch.randint(0, 256, (pool_bytes,), dtype=torch.uint8)
    return _copies(source, torch.zeros_like(source), None)


def _pcie(pool_bytes: int) -> Batch:
    source = torch.randint(0, 256, (pool_bytes,), dtype=torch.uint8).pin_memory()
    return _copies(source, torch.zeros_like(source, device="cuda"), torch.cuda.Stream())


def _copies(source: torch.Tensor, target: torch.Tensor, stream) -> Batch:
    """Copies between random places of two pools, one after another, or queued on a stream."""
    rng = np.random.default_rng(SEED)

    def batch(size: int, count: int) -> float:
        places = (rng.integers(0, (len(source) - size) // PAGE + 1, (count, 2)) * PAGE).tolist()
        start = time.perf_counter()
        with torch.cuda.stream(stream) if stream else nullcontext():
            for here, there in places:
                target[there : there + size].copy_(source[here : here + size], non_blocking=True)
        if stream:
            stream.synchronize()
        return time.perf_counter() - start

    return batch


# ---- compute and links at once --------------------------------------------------------------------------------------
def _beside(busy: Callable[[], float], batch: Batch, plan: dict) -> dict:
    """How much longer compute and link take while both run, as factors of at least 1."""
    size, depth = BESIDE_BYTES, max(plan["depths"]) // 2

    def transfer() -> float:
        return batch(size, depth)

    seconds, repeats = plan["seconds"]["beside"], plan["repeats"]
    alone = sample({"compute": busy, "transfer": transfer}, seconds, repeats)
    stop, transfers = threading.Event(), []

    def keep() -> None:
        with torch.inference_mode():  # a thread has its own mode
            while not stop.is_set() or not transfers:
                transfers.append(transfer())

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        both = {"compute": sample({0: busy}, seconds, repeats)[0]}
    finally:
        stop.set()
        thread.join()
    both["transfer"] = np.array(transfers)
    factors = {part: number(both[part] / np.median(alone[part])) for part in ("compute", "transfer")}
    return {part: factor | {"value": max(factor["value"], 1.0)} for part, factor in factors.items()}
