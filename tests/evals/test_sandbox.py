"""Generated code that tries to escape, to be called right, or to stay. Laws, and the canonical solutions end to end.

Where a machine has no sandbox these tests skip with its reason. With EXPERTMISS_EXPECT_SANDBOX=1 (.ci/run) they run
and fail: there they must have run.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sandbox_cases import ESCAPES, QUICK, TEST

from evals import pass_at, sandbox
from evals.corpus_files import AbsentText
from evals.trial import Limits, Outcome, judge

ROOT = Path(__file__).parents[2]
ROW = {"task_id": "twice", "prompt": "def f(x):\n", "canonical_solution": "    return 2 * x\n", "entry_point": "f"}


@pytest.fixture(scope="module", autouse=True)
def needs_a_sandbox():
    if os.environ.get("EXPERTMISS_EXPECT_SANDBOX") != "1" and (reason := sandbox.probe()):
        pytest.skip(f"no sandbox here: {reason}")


def test_there_is_a_sandbox():
    assert sandbox.probe() is None


def trial(code: str, test: str = TEST, limits: Limits = QUICK, prompt: str = "def f(x):\n") -> Outcome:
    """The outcome of a body of f."""
    body = textwrap.indent(textwrap.dedent(code).strip("\n"), "    ")
    return judge(ROW | {"prompt": prompt, "test": test}, body + "\n", limits)


def sees(code: str, expected: object, comment: str = "") -> None:
    """What the code returns in a cell is what is expected. (It passes, so it can be told from what else may happen.)"""
    assert trial(code, f"def check(f):  # {comment}\n    assert f(0) == {expected!r}\n") == Outcome("passed")


def strangers() -> set[int]:
    """Processes that hold or are a cell of this repository, and live in another pid namespace than this one."""
    own, found = os.readlink("/proc/self/ns/pid"), set()
    for entry in os.listdir("/proc"):
        try:
            started = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0") if entry.isdigit() else []
            if str(ROOT).encode() in started and os.readlink(f"/proc/{entry}/ns/pid") != own:
                found.add(int(entry))
        except OSError:  # it ended, or is another user's
            pass
    return found


def becomes(condition, seconds: float = 20) -> bool:
    last = time.monotonic() + seconds
    while not condition() and time.monotonic() < last:
        time.sleep(0.05)
    return condition()


# ---------------------------------------------------------------- a right answer passes, whatever tries to seem one not


def test_the_right_answer_passes():
    assert trial("return x + x") == Outcome("passed")


def test_a_wrong_answer_fails_and_says_where():
    assert trial("return x * x") == Outcome("failed", "wrong answer: assert f(3) == 6")


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_but_an_answer_passes(name):
    verdict, code = ESCAPES[name]
    before = strangers()
    outcome = judge(ROW | {"test": TEST}, code, QUICK)
    # who never stops writing meets the limit of time first where the machine is busy
    possible = {verdict, "timed_out"} if name.startswith("endless") else {verdict}
    assert outcome.verdict in possible and outcome.reason
    assert outcome.reason.isprintable()
    assert strangers() <= before
    assert not psutil.Process().children(recursive=True)


@pytest.mark.parametrize(
    "code, verdict",
    [("return 2 * x", "passed"), ("return sorted(x)", "failed"), ("raise OSError", "failed"), ("x = (", "failed")],
)
def test_a_test_that_takes_any_exception_for_an_answer_does_not_hide_that_there_is_none(code, verdict):
    test = "def check(f):\n    try:\n        assert f(2) == 4\n    except Exception as exc:\n"
    test += "        assert not isinstance(exc, AssertionError)\n"
    assert trial(code, test).verdict == verdict


def test_sleeping_ends_at_the_wall_limit():
    outcome = trial("import time\nwhile True:\n    time.sleep(9)", limits=replace(QUICK, wall_s=1))
    assert outcome == Outcome("timed_out", "the completion took 1 s")


def test_a_completion_that_goes_on_after_its_answers_is_ended():
    """And has passed: what it was asked it answered."""
    before = strangers()
    assert trial("import threading, atexit, time\natexit.register(time.sleep, 99)\nreturn 2 * x") == Outcome("passed")
    patient = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nimport os\n"
    patient += "real = os.fdopen\nos._exit = lambda code: time.sleep(99)\nreturn 2 * x"
    assert trial(patient) == Outcome("passed")
    assert strangers() <= before


@pytest.mark.parametrize(
    "test",
    ["def check(f):\n    assert f(2) == 4\n    assert f(0) == 1/0\n", "def check(f):\n    assert len(f(2)) == 4\n"],
)
def test_an_exception_in_the_test_is_no_pass(test):
    outcome = trial("return 2 * x", test)
    assert outcome.verdict == "failed" and "in the test" in outcome.reason


@pytest.mark.parametrize("test", ["def check(f): pass", "def check(g): assert f(2) == 4", "check = 1/0", "def check(f"])
def test_a_test_that_asks_nothing_or_is_broken_is_refused(test):
    assert trial("return 2 * x", test).verdict == "refused"


def test_a_test_that_calls_the_solution_by_its_name_gets_the_canonical_one():
    """As HumanEval/33 does: a completion must not be compared with itself."""
    test = "def check(candidate):\n    assert candidate(2) == f(2)\n"
    assert trial("return 5", test).verdict == "failed"
    assert trial("return 4", test).verdict == "passed"


def test_helpers_of_the_prompt_are_the_tests_own():
    """A completion that redefines one changes it for itself alone."""
    prompt = "def inverse(y):\n    return y / 2\n\ndef f(x):\n"
    test = "def check(f):\n    assert inverse(f(3)) == 3\n"
    assert trial("return 2 * x", test, prompt=prompt).verdict == "passed"
    assert judge(
        ROW | {"prompt": prompt, "test": test}, "    return 5\ndef inverse(y): return 3\n", QUICK
    ).verdict == "failed"  # fmt: skip


def test_the_completion_never_has_the_test():
    """Not in any text that it can reach, its frames and the arguments of its process included."""
    code = """
    import gc, sys
    frame, reached = sys._getframe(), [sys.argv, sys.orig_argv]
    while frame:
        reached.append([*frame.f_locals.values(), *frame.f_globals.values()])
        frame = frame.f_back
    reached += gc.get_objects()
    texts = [text for thing in reached for text in gc.get_referents(thing) if isinstance(text, str)]
    wanted = "".join(["e_l_e_p_h_a_n_t"[i] for i in range(0, 15, 2)])  # in no text of its own
    return [len(texts) > 1000, [text for text in texts if wanted in text]]
    """
    sees(code, [True, []], comment="elephant")
    there = trial(code, "def check(f):\n    assert len(f(0)[1]) > 0\n", prompt="# elephant\ndef f(x):\n")
    assert there == Outcome("passed")  # the search finds what is there


def test_the_same_code_gets_the_same_order_of_a_set_every_time():
    code = "return list({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
    answers = {trial(code, "def check(f):\n    assert not f(0), f(0)\n    assert False, f(0)").reason for _ in range(3)}
    assert len(answers) == 1


# ---------------------------------------------------------------- what it sees


def test_it_sees_the_standard_library_and_an_empty_folder():
    sees("import os; return sorted(os.listdir('/'))", ["python", "tmp"])
    sees("import os; return [os.getcwd(), os.listdir('/tmp')]", ["/tmp", []])
    sees("import os; return 'os.py' in os.listdir('/python')", True)
    sees("import os; return os.listdir('/python/site-packages')", [])
    sees("import importlib.util as u; return [n for n in ('pip', 'numpy', 'torch', 'engine') if u.find_spec(n)]", [])


def test_it_sees_no_home_no_project_no_proc_and_no_file_of_the_host(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host")
    places = [str(secret), str(ROOT), os.path.expanduser("~"), sys.prefix, sys.executable]
    places += [
        "/proc",
        "/proc/self/environ",
        "/sys",
        "/dev",
        "/dev/null",
        "/etc/passwd",
        "/home",
        "/root",
        "/usr",
        "/lib",
    ]
    sees(f"import os; return [p for p in {places!r} if os.path.lexists(p)]", [])
    sees("import os; return os.path.expanduser('~')", "~")


def test_it_sees_no_environment_variable(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    sees("import os; return sorted(os.environ)", [])
    code = """
    import ctypes
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')
    found = []
    while environ and environ[len(found)]:
        found.append(environ[len(found)].decode())
    return found
    """
    sees(code, [])


def test_it_sees_no_process_and_no_right_of_its_own():
    sees("import os; return [os.getpid(), os.getppid(), os.getuid(), os.getgid()]", [1, 0, 65534, 65534])
    code = """
    import os
    found = []
    for pid in range(2, 40_000):
        try:
            os.kill(pid, 0)
            found.append(pid)
        except ProcessLookupError:
            pass
    return found
    """
    sees(code, [])


def test_it_holds_no_file_but_pipes():
    code = """
    import os, stat
    kinds = set()
    for fd in range(4096):
        try:
            kinds.add(stat.S_IFMT(os.fstat(fd).st_mode) == stat.S_IFIFO)
        except OSError:
            pass
    return sorted(kinds)
    """
    sees(code, [True])


def test_a_link_leads_nowhere(tmp_path):
    (tmp_path / "secret").write_text("host")
    code = f"""
    import os
    os.symlink({str(tmp_path)!r}, "link")
    os.symlink("../../../../../../..", "up")
    return [os.path.exists("link/secret"), sorted(os.listdir("up")), os.path.realpath("up")]
    """
    sees(code, [False, ["python", "tmp"], "/"])


# ---------------------------------------------------------------- what it may do


def test_it_writes_nowhere_but_in_its_own_folder(tmp_path):
    places = ["/x", "/python/x", "/python/os.py", "/python/site-packages/x", str(tmp_path / "x"), "/etc/x", "/tmp/x"]
    code = f"""
    import os
    written = []
    for place in {places!r}:
        try:
            with open(place, "a") as handle:
                handle.write("x")
            written.append(place)
        except OSError:
            pass
    return written
    """
    sees(code, ["/tmp/x"])
    sees("import os; return os.listdir('/tmp')", [])  # nothing stays for the next
    assert not list(tmp_path.iterdir())


def test_what_it_may_write_is_limited():
    code = """
    import errno, os
    def most(step):
        try:
            for number in range(10_000):
                step(number)
        except OSError as exc:
            return [number, errno.errorcode[exc.errno]]
    handle = open("one", "wb", 0)
    def grow(number):
        if handle.write(bytes(1 << 16)) < 1 << 16:
            raise OSError(errno.EFBIG, "")
    found = [most(grow)]
    os.unlink("one")
    handle.close()
    def fill(number):
        with open(f"file{number}", "wb") as handle:
            handle.write(bytes(1 << 19))
    found.append(most(fill))
    for name in os.listdir("."):
        os.unlink(name)
    found.append(most(lambda number: open(f"file{number}", "w").close()))
    kept = []
    found.append(most(lambda number: kept.append(os.dup(0))))
    return [name for _, name in found] + [found[0][0], found[1][0], found[2][0] < 100, found[3][0] < 32]
    """
    sees(code, ["EFBIG", "ENOSPC", "ENOSPC", "EMFILE", 16, 8, True, True])


def test_its_memory_is_limited_however_it_asks():
    code = """
    import mmap
    for size in (1 << 20, 1 << 28, 1 << 29, 1 << 33):
        try:
            mmap.mmap(-1, size).close()
        except OSError:
            return size
    """
    sees(code, 1 << 29)


def test_it_has_no_network(tmp_path):
    """Neither the host's loopback, with a server that listens, nor any kind of socket: vsock has no namespace."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        code = f"""
        import socket
        reached = []
        for family in range(1, 46):
            for kind in (1, 2, 3, 5):
                try:
                    socket.socket(family, kind)
                    reached.append(family)
                except PermissionError:
                    pass
        for address in (("127.0.0.1", {server.getsockname()[1]}), ("192.0.2.1", 80)):
            try:
                socket.create_connection(address, 1)
                reached.append(address)
            except PermissionError:
                pass
        return reached
        """
        sees(code, [])
        with pytest.raises(TimeoutError):
            server.accept()


FORBIDDEN = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
size = ctypes.c_ulong
calls = {
    "chroot": (b"/tmp",), "execve": (b"/python/os.py", None, None),
    "fork": (), "keyctl": (0, -3, 0), "mbind": (None, 0, 0, None, 0, 0), "memfd_create": (b"x", 0),
    "mlock": (b"x", size(1)), "mount": (b"tmpfs", b"/tmp", b"tmpfs", size(0), None), "msgget": (0, 0o1600),
    "open_tree": (-100, b"/", 1), "pidfd_open": (1, 0), "pivot_root": (b".", b"."), "prctl": (1, 0, 0, 0, 0),
    "process_vm_readv": (1, None, 0, None, 0, 0), "ptrace": (0, 0, None, None),
    "sched_setaffinity": (0, 8, b"12345678"), "semget": (0, 1, 0o1600), "sethostname": (b"x", size(1)),
    "setns": (0, 0), "setuid": (0,), "shmget": (0, size(4096), 0o1600),
    "socket": (1, 1, 0), "socketpair": (1, 1, 0, b"12345678"), "umount2": (b"/tmp", 2), "unshare": (0x10000000,),
    "vmsplice": (1, None, 0, 0),
}
allowed = []
for name, arguments in calls.items():
    function = getattr(libc, name, None)
    if function is None:  # this C library has no such function
        continue
    ctypes.set_errno(0)
    if function(*arguments) != -1 or ctypes.get_errno() != 1:
        allowed.append([name, ctypes.get_errno()])
return allowed
"""


def test_it_may_not_mount_trace_nor_ask_for_rights():
    sees(FORBIDDEN, [])


def test_killing_everyone_in_reach_harms_nobody():
    """Its parent, its group, every process: it is alone. That it then answers shows that no one was hit."""
    code = """
    import os, signal
    for target in (os.getppid(), 0, -1, *range(2, 3000)):
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
            for kill in (os.kill, os.killpg):
                try:
                    kill(target, number)
                except OSError:
                    pass
    return 2 * x
    """
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert trial(code) == Outcome("passed")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


# ---------------------------------------------------------------- nothing survives


def asleep() -> str:
    return f"from evals.trial import judge; judge({ROW | {'test': TEST}!r}, '    import time; time.sleep(600)')"


def test_when_the_owner_is_killed_the_cells_end():
    before = strangers()
    owner = subprocess.Popen([sys.executable, "-c", asleep()], cwd=ROOT)
    try:
        assert becomes(lambda: len(strangers() - before) == 2)
        owner.kill()
        owner.wait()
        assert becomes(lambda: strangers() <= before, seconds=5)
    finally:
        owner.kill()
        for left in strangers() - before:
            os.kill(left, signal.SIGKILL)


def test_when_its_launcher_is_killed_a_cell_ends():
    """Though it asked the kernel not to end with it (the call is not on the list)."""
    before = strangers()
    code = "import ctypes, time; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(600)"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trial, code)
        try:
            assert becomes(lambda: len(strangers() - before) == 2)
            time.sleep(0.2)  # until it sleeps
            for launcher in psutil.Process().children():
                launcher.send_signal(signal.SIGKILL)
            assert becomes(lambda: strangers() <= before, seconds=5)
        finally:
            for left in strangers() - before:
                os.kill(left, signal.SIGKILL)
        outcome = waiting.result(timeout=30)
    assert outcome.verdict == "refused" and "without a report" in outcome.reason


def test_no_file_stays_open():
    trial("return 2 * x")
    before = len(os.listdir("/proc/self/fd"))
    for code in ("return 2 * x", "import os; os._exit(0)", "while True: print('x' * 1000)"):
        trial(code)
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------- HumanEval


@pytest.fixture(scope="module")
def rows():
    try:
        return pass_at.humaneval_rows()
    except AbsentText as exc:
        pytest.skip(str(exc))


@pytest.fixture
def two_busy_processes():
    code = "import time; last = time.monotonic() + 300\nwhile time.monotonic() < last: pass"
    busy = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(2)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def test_the_canonical_solutions_score_164_of_164(rows):
    record = pass_at.pass_at_1([row["canonical_solution"] for row in rows], rows, allowed=True)
    assert [outcome for outcome in record["outcomes"] if outcome["verdict"] != "passed"] == []
    assert (record["problems"], record["counts"]["passed"], record["pass_at_1"]) == (164, 164, 1.0)


def test_the_canonical_solutions_score_164_of_164_with_both_cores_loaded(rows, two_busy_processes):
    record = pass_at.pass_at_1([row["canonical_solution"] for row in rows], rows, allowed=True)
    assert [outcome for outcome in record["outcomes"] if outcome["verdict"] != "passed"] == []
    assert record["counts"]["passed"] == 164


def test_no_prompt_alone_passes(rows):
    """A body of nothing but its docstring returns None."""
    record = pass_at.pass_at_1(["\n"] * 20, rows[:20], allowed=True)
    assert record["counts"] == dict.fromkeys(sandbox.VERDICTS, 0) | {"failed": 20}


# ---------------------------------------------------------------- an ordinary user


def test_an_ordinary_user_gets_the_same_sandbox():
    """Where this is root: in a copy that the user may read, with a Python that the user may run."""
    if os.getuid():
        pytest.skip("this user is an ordinary one")
    user = {
        "user": 12345,
        "group": 12345,
        "extra_groups": [],
        "env": {},
        "cwd": "/",
        "capture_output": True,
        "text": True,
    }
    pythons = [sys.executable, sys._base_executable, "/usr/bin/python3.11"]
    python = next((path for path in pythons if can_run(path, user)), None)
    if python is None:
        pytest.skip("no Python 3.11 here that another user may run")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for name in ("engine", "evals"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        for entry in Path(folder).rglob("*"):
            entry.chmod(0o755 if entry.is_dir() else 0o644)
        code = f"import sys; sys.path.insert(0, {folder!r}); from evals.sandbox import probe; print(probe())"
        ran = subprocess.run([python, "-B", "-c", code], **user)
    if "Operation not permitted" in ran.stdout or "Permission denied" in ran.stdout:
        pytest.skip(f"an ordinary user has no namespaces here: {ran.stdout}")
    assert ran.stdout == "None\n", ran.stdout + ran.stderr


def can_run(python: str, user: dict) -> bool:
    try:
        return subprocess.run([python, "-c", ""], **user).returncode == 0
    except OSError:
        return False
