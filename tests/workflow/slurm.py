"""A real Slurm cluster on this machine's loopback: a controller and two nodes, hosta and hostb, as root, no accounting.

Everything lies in one folder: munge's key and socket, configuration, state, spool, logs. It is started and stopped by
process id. Both nodes are this machine; each has its name for a feature, so that a job can ask for it.

    with Cluster(folder) as cluster:
        subprocess.run(["squeue"], env=os.environ | cluster.environment)
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

from engine.files import write_text

NODES = ("hosta", "hostb")
PROGRAMS = ("munged", "slurmctld", "slurmd")
PLUGIN = "snakemake_executor_plugin_slurm"
LIMIT_S = 30.0
CONFIGURATION = """
ClusterName=expertmiss
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MessageTimeout=3
DefMemPerNode=1500
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=3600
NodeName=hosta NodeHostname={machine} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=100000 Feature=hosta
NodeName=hostb NodeHostname={machine} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=100000 Feature=hostb
PartitionName=all Nodes=hosta,hostb Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """The reason why no cluster can be started here."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not installed (packages slurm-wlm and munge)"
    if importlib.util.find_spec(PLUGIN) is None:
        return "requirements-slurm.lock is not installed"
    return None if os.geteuid() == 0 else "the daemons need root"


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    def __init__(self, folder: Path, *, cpus: int = 1) -> None:
        self.folder, self.processes = folder, {}
        for name in ("state", *(f"spool_{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        machine = socket.gethostname().split(".")[0]
        configuration = CONFIGURATION.format(machine=machine, ports=free_ports(3), folder=folder, cpus=cpus)
        write_text(folder / "slurm.conf", configuration)
        # a job's own step loses every SLURM_ variable, so srun must be told anew where the configuration lies
        srun = f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {shutil.which("srun")} "$@"\n'
        write_text(folder / "bin" / "srun", srun)
        (folder / "bin" / "srun").chmod(0o755)
        self.environment = {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{folder}/bin:{os.environ['PATH']}"}

    def __enter__(self) -> Cluster:
        try:
            files = [f"--{name}={self.folder}/munge.{name}" for name in ("socket",)]
            files += [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
            self.start("munged", "munged", "--foreground", "--force", *files)
            self.wait_until(lambda: (self.folder / "munge.socket").exists())
            self.start_controller()
            for node in NODES:
                self.start_node(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.told("scancel", "--me")
            self.wait_until(lambda: not self.told("squeue", "--noheader"))
        for name in reversed(self.processes):
            self.stop(name)
        self.signal(signal.SIGKILL)

    # ---- its parts ---------------------------------------------------------------------------------------------------
    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                command, env=os.environ | self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        process = self.processes[name]
        process.send_signal(how)
        try:
            process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start_controller(self) -> None:
        self.start("slurmctld", "slurmctld", "-D")
        self.wait_until(lambda: "UP" in subprocess.run(["scontrol", "ping"], **self._quiet()).stdout)

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node)
        if "down" in self.state(node):  # by word of lose_node
            # refused where it has returned by itself in the meantime
            subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], **self._quiet())
        self.wait_until(lambda: self.state(node) in ("idle", "alloc"))

    def lose_node(self, node: str) -> None:
        """The node and all that runs on it are gone from one moment to the next, and the controller sees it."""
        self.stop(node, signal.SIGKILL)
        self.signal(signal.SIGSTOP, node)  # nothing tells the controller how it ends
        self.told("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
        self.signal(signal.SIGKILL, node)

    def signal(self, number: int, node: str = "") -> None:
        for pid in self.of_jobs(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def of_jobs(self, node: str = "") -> list[int]:
        """Processes of the cluster's jobs, by the environment that Slurm gave them, and those that started them.

        A slurmstepd writes its title over its own environment.
        """
        wanted = [f"SLURM_CONF={self.folder}/slurm.conf\0".encode(), f"SLURMD_NODENAME={node}".encode()]
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                told = Path(f"/proc/{process.pid}/environ").read_bytes()
                if all(words in told for words in wanted):
                    above = process.parents()
                    found |= {process.pid} | {
                        one.pid for one in above if " ".join(one.cmdline()).startswith("slurmstepd")
                    }
        return sorted(found)

    # ---- what it says ------------------------------------------------------------------------------------------------
    def _quiet(self) -> dict:
        return {"env": os.environ | self.environment, "capture_output": True, "text": True, "timeout": LIMIT_S}

    def told(self, *command: str) -> str:
        ended = subprocess.run(command, **self._quiet())
        assert ended.returncode == 0, (command, ended.stderr)
        return ended.stdout.strip()

    def state(self, node: str) -> str:
        return self.told("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%t")

    def running(self) -> dict[str, str]:
        """Node of every job that runs, by id."""
        rows = self.told("squeue", "--noheader", "--states=RUNNING", "--format=%i %N").splitlines()
        return dict(row.split() for row in rows)

    def memory(self) -> set[str]:
        """That jobs which run have asked a node for."""
        return set(self.told("squeue", "--noheader", "--states=RUNNING", "--format=%m").split())

    def ended(self) -> int:
        """Jobs that the controller still knows and that are done, however."""
        return len(self.told("squeue", "--noheader", "--states=CD,F,CA,NF,OOM,TO", "--format=%i").splitlines())

    def over_memory(self) -> set[str]:
        """Jobs that the nodes killed for it; the controller calls them failed."""
        logs = [path.read_text(encoding="utf-8") for path in self.folder.glob("slurmd_*.log")]
        return set(re.findall(r"StepId=(\d+)\.\d+ exceeded memory limit", "".join(logs)))

    def job_of(self, *words: str) -> str:
        """The job that runs a command line with these words."""
        for pid in self.of_jobs():
            with contextlib.suppress(OSError):
                process = Path("/proc") / str(pid)
                if set(words) <= set((process / "cmdline").read_text(encoding="utf-8").split("\0")):
                    environment = (process / "environ").read_text(encoding="utf-8").split("\0")
                    return dict(line.partition("=")[::2] for line in environment)["SLURM_JOB_ID"]
        raise AssertionError(f"no job runs {words}")

    @staticmethod
    def wait_until(true, limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < end, "the cluster does not answer"
            time.sleep(0.1)
