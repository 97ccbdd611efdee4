"""What does code in the cell see, and what may it do?

    sees      a file system of two folders: /python, the standard library, read only, and /tmp, small and empty. No
              home, no project, no /proc, /sys or /dev, no installed package, no environment variable
    network   none: a network namespace without even a loopback, and no socket can be made
    others    no process of the host: the code is process 1 of its own pid namespace, in its own ipc, uts and cgroup
              namespaces, mapped in its own user namespace to one unprivileged user
    rights    no capability, none to be had (no_new_privs, empty bounding set), the calls of syscalls.py alone
    limits    memory, processor time, one process, one thread, open files, bytes a file, bytes in /tmp

Root becomes an ordinary user (nobody) first, so both take one path: an unprivileged user namespace. `enter` and
`confine` make the cell, `faults` looks from inside whether it is one; who finds a fault, or an OSError, runs nothing.

    enter(); if os.fork() == 0: confine(limits); assert not faults(limits); run()
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import sys

from evals.cell import syscalls

LIBRARY = os.path.dirname(os.__file__)  # the standard library
NOBODY = 65534
VIEW = ["python", "tmp"]
TMP_BYTES, TMP_FILES = 4 << 20, 64
MASKED = ("dist-packages", "site-packages")  # of the standard library's folder

# linux/sched.h, linux/mount.h, linux/prctl.h
NAMESPACES = {
    "cgroup": 0x02000000, "ipc": 0x08000000, "mnt": 0x00020000, "net": 0x40000000, "pid": 0x20000000,
    "user": 0x10000000, "uts": 0x04000000,
}  # fmt: skip
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18
)  # fmt: skip
DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_READ, PR_CAPBSET_DROP = 1, 4, 23, 24
PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 39, 47, 4
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of the C library; OSError, with its name, where it fails."""
    result = getattr(libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, options: str = "") -> None:
    call("mount", source, target, kind, ctypes.c_ulong(flags), options.encode() or None)


def enter() -> None:
    """New namespaces for this process and a new root; its next child is the first process of the pid namespace."""
    os.chdir(LIBRARY)  # before root gives up its rights: the way there may be closed to others
    become_nobody()
    own = os.getuid(), os.getgid()
    moving = [name for name in NAMESPACES if name != "pid"]  # the next child's, which finds itself to be number 1
    before = {name: os.readlink(f"/proc/self/ns/{name}") for name in moving}
    call("unshare", sum(NAMESPACES.values()))
    if same := [name for name in moving if os.readlink(f"/proc/self/ns/{name}") == before[name]]:
        raise OSError(errno.EPERM, f"no new {', '.join(same)} namespace")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {own[0]} 1"),
        ("gid_map", f"{NOBODY} {own[1]} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as handle:
            handle.write(text)
    build_view()
    name = b"sandbox"
    call("sethostname", name, len(name))


def become_nobody() -> None:
    """Root, exempt from limits on processes in a user namespace too, leaves for good; others stay who they are."""
    if 0 in (os.getuid(), os.geteuid()):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self, with uid_map, is still root's


def build_view() -> None:
    """A new root from nothing but the working directory, which becomes /python."""
    mount(None, b"/", None, RECURSIVE | PRIVATE)
    mount(b"tmpfs", b"/tmp", b"tmpfs", NO_SUID | NO_DEVICES | NO_EXEC, "size=64k,nr_inodes=16,mode=755")
    for name in VIEW:
        os.mkdir(f"/tmp/{name}")
    mount(b".", b"/tmp/python", None, BIND)  # refused where another mount lies below: it could be writable
    flags = REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES  # noexec cannot be: extension modules are mapped
    flags |= NO_EXEC if os.statvfs("/tmp/python").f_flag & os.ST_NOEXEC else 0  # locked where the host has it
    mount(None, b"/tmp/python", None, flags)
    for name in MASKED:
        if os.path.isdir(f"/tmp/python/{name}"):
            mount(b"tmpfs", f"/tmp/python/{name}".encode(), b"tmpfs", READ_ONLY, "size=4k,nr_inodes=2")
    options = f"size={TMP_BYTES},nr_inodes={TMP_FILES},mode=700"
    mount(b"tmpfs", b"/tmp/tmp", b"tmpfs", NO_SUID | NO_DEVICES | NO_EXEC, options)
    os.chdir("/tmp")
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)  # the old root lies over the new one: see pivot_root(2)
    os.chdir("/")
    mount(None, b"/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC)
    os.chdir("/tmp")
    use_view()


def use_view() -> None:
    """Imports look in /python, those of modules within packages that are loaded already too."""
    sys.path[:] = ["/python", "/python/lib-dynload"]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        if paths := getattr(module, "__path__", None):
            module.__path__ = [str(path).replace(LIBRARY, "/python", 1) for path in paths]


def confine(limits: dict) -> None:
    """Limits, no rights, no way to more, the list of calls; in the process that will run the code."""
    for name, value in resources(limits).items():
        resource.setrlimit(name, (value, value))
    capability = 0
    while libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        capability += 1
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    call("capset", capability_header(), (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # last: a change of rights clears it
    os.environ.clear()


def resources(limits: dict) -> dict[int, int]:
    return {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: 2 * limits["cpu_s"],  # see inside.watch
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_STACK: 8 << 20,
    }


def capability_header() -> ctypes.Array:
    return (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)


def faults(limits: dict) -> list[str]:
    """What is wrong with the cell that this process is in, one line each; none: the code may run.

    The list of calls comes last, because it stops the looking; it is installed here, once all else is right.
    """
    held = (ctypes.c_uint32 * 6)()
    libc.capget(capability_header(), held)
    found = {
        "other folders than /python and /tmp": sorted(os.listdir("/")) != VIEW,
        "files in /tmp": os.path.exists("/tmp") and bool(os.listdir("/tmp")),
        "/python cannot be read": not os.access("/python/os.py", os.R_OK),
        "/ can be written": writable("/"),
        "/python can be written": writable("/python"),
        "not the first process of its namespace": (os.getpid(), os.getppid()) != (1, 0),
        "in a group with others": (os.getpgid(0), os.getsid(0)) != (1, 1),
        "another user": set(os.getresuid() + os.getresgid()) != {NOBODY},
        "capabilities": any(held),
        "capabilities to be had": libc.prctl(PR_CAPBSET_READ, 0, 0, 0, 0) != 0,
        "new privileges": libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1,
        "a route to the outside": can_route("192.0.2.1"),
        "a loopback": can_route("127.0.0.1"),
        "the host's name": os.uname().nodename != "sandbox",
        "environment variables": bool(os.environ),
        "other limits": any(resource.getrlimit(name) != (value, value) for name, value in resources(limits).items()),
    }
    wrong = [name for name, is_so in found.items() if is_so]
    if not wrong:
        syscalls.install()
        if libc.unshare(0) != -1:  # it changes nothing, and is not on the list
            wrong.append("other calls to the kernel than those of the list")
    return wrong


def writable(folder: str) -> bool:
    """By its mount, not by its owner: an ordinary user may own the standard library."""
    return os.path.isdir(folder) and not os.statvfs(folder).f_flag & os.ST_RDONLY


def can_route(address: str) -> bool:
    """Whether the kernel has a way there; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return False
    return True
