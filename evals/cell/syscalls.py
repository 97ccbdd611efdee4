"""Which calls to the kernel may the code make? Those of this list; every other one is answered with EPERM.

The list is what one process with one thread needs to compute, and to read and write files. What is not on it: a second
process or thread (so the limits on one process are limits on all there is), another program, any socket (the network
namespace has none of the host's networks, but AF_VSOCK has no namespace), shared memory that no limit counts, other
namespaces and mounts, tracing, keys, and whatever a newer kernel adds. Seccomp cannot be undone.

    install()
"""

from __future__ import annotations

import ctypes
import platform
import struct

# name: number on x86_64, number on aarch64 (None: it has no such call)
ALLOWED: dict[str, tuple[int, int | None]] = {
    # memory
    "brk": (12, 214),
    "fadvise64": (221, 223),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mincore": (27, 232),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "msync": (26, 227),
    "munmap": (11, 215),
    # open files
    "close": (3, 57),
    "close_range": (436, 436),
    "copy_file_range": (326, 285),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "fcntl": (72, 25),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "fsync": (74, 82),
    "lseek": (8, 62),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "pwrite64": (18, 68),
    "pwritev": (296, 70),
    "read": (0, 63),
    "readv": (19, 65),
    "sendfile": (40, 71),
    "write": (1, 64),
    "writev": (20, 66),
    # names
    "access": (21, None),
    "chdir": (80, 49),
    "chmod": (90, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fallocate": (285, 47),
    "fchdir": (81, 50),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fstat": (5, 80),
    "fstatfs": (138, 44),
    "ftruncate": (77, 46),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "link": (86, None),
    "linkat": (265, 37),
    "lstat": (6, None),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "rmdir": (84, None),
    "stat": (4, None),
    "statfs": (137, 43),
    "statx": (332, 291),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "truncate": (76, 45),
    "umask": (95, 166),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    # waiting
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_wait": (232, None),
    "eventfd2": (290, 19),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pselect6": (270, 72),
    "select": (23, None),
    # signals and time
    "alarm": (37, None),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "getitimer": (36, 102),
    "gettimeofday": (96, 169),
    "kill": (62, 129),
    "nanosleep": (35, 101),
    "pause": (34, None),
    "restart_syscall": (219, 128),
    "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "setitimer": (38, 103),
    "sigaltstack": (131, 132),
    "tgkill": (234, 131),
    "time": (201, None),
    "times": (100, 153),
    "tkill": (200, 130),
    # its own process
    "arch_prctl": (158, None),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getgroups": (115, 158),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getpriority": (140, 141),
    "getrandom": (318, 278),
    "getresgid": (120, 150),
    "getresuid": (118, 148),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getsid": (124, 156),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "prlimit64": (302, 261),
    "rseq": (334, 293),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "setrlimit": (160, 164),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "wait4": (61, 260),
    "waitid": (247, 95),
}
# machine: column of ALLOWED, AUDIT_ARCH of linux/audit.h
MACHINES = {"aarch64": (1, 0xC00000B7), "x86_64": (0, 0xC000003E)}

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF_LD | W | ABS; BPF_JMP | JEQ | K; BPF_RET | K
KILL, ALLOW, EPERM = 0x80000000, 0x7FFF0000, 0x00050001  # SECCOMP_RET_KILL_PROCESS, _ALLOW, _ERRNO | EPERM
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def filter_code(machine: str) -> bytes:
    """The filter as BPF; KeyError for a machine whose numbers are not here.

    A process of another architecture (32-bit calls have other numbers) is killed. Numbers of the x32 interface have a
    bit that none of the list has.
    """
    column, architecture = MACHINES[machine]
    numbers = sorted(row[column] for row in ALLOWED.values() if row[column] is not None)
    steps = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    for number in numbers:
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]  # not this one: over the return, to the next
    steps.append((RETURN, 0, 0, EPERM))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def install() -> None:
    """For this process, for good; it must have no_new_privs. OSError where the kernel refuses."""
    code = filter_code(platform.machine())
    program = Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
