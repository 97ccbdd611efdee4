"""Which machine is this? Facts that last, the fingerprint made of them, and what a reader needs to judge a measurement.

A host is a machine, by fingerprint: processor, logical cores, memory in whole GiB, GPUs, and a hash of the machine id.
Another disk, kernel or version of Python leaves it as it is. Nothing here names a host, a user, a network or a path.

    fingerprint()        # '3f2a...', 16 hexadecimal digits
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

MEMORY_FILESYSTEMS = ("ramfs", "tmpfs")  # O_DIRECT means nothing there


def machine_facts() -> dict:
    """Facts that last: processor, logical cores, memory in whole GiB, GPUs. No name of host, user or network."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "ram_bytes": round(psutil.virtual_memory().total / 2**30) * 2**30,
        "gpus": _of_gpus("name"),
    }


def fingerprint() -> str:
    """16 hexadecimal digits: sha256 over machine_facts and a hash of the machine id where that is readable."""
    identity = Path("/etc/machine-id")
    try:
        secret = hashlib.sha256(b"expertmiss:" + identity.read_bytes().strip()).hexdigest()
    except OSError:
        secret = ""
    return digest([machine_facts(), secret])


@functools.cache
def _of_gpus(what: str) -> list[str]:
    """Of every GPU, as the NVIDIA driver's own tool lists them, so that no framework need be imported."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line.strip() for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def software_facts(folder: Path) -> dict:
    """What a reader needs to judge the numbers; nothing that names a user, a host or a path."""
    release = platform.release().split("-")[0]
    memory = _of_gpus("memory.total")  # MiB; of the first, on which a model runs
    return {
        **({"gpu_bytes": int(memory[0].split()[0]) << 20} if memory else {}),
        "disk": _disk_model(folder),
        "filesystem": filesystem(folder),
        "os": f"{platform.system()} {release}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def filesystem(folder: Path) -> str | None:
    """The type of filesystem a folder is on."""
    place = folder.resolve()
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    for parent in (place, *place.parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return None


def _disk_model(folder: Path) -> str | None:
    """As the kernel names the device under a folder, or None."""
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return None
    for place in (device.resolve(), device.resolve().parent):  # a partition's model is its disk's
        if (model := place / "device" / "model").exists():
            return model.read_text(encoding="utf-8").strip()
    return "virtual" if "virtio" in str(device.resolve()) else None
