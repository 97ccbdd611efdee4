# What a cluster needs to know of this run (docs/cluster.md): how large its jobs are, which nodes are hosts, and which
# jobs a killed run left behind.

from engine.cluster import Ask, Node, nodes, of_policy
from engine.measured_run import OWN
from evals.cluster import ask_again, cancel_orphans

NODES = nodes(SETTINGS.hosts)


def held(wildcards, attempt):
    """Of a job that holds the model, at the size of its files."""
    model = SETTINGS.models[wildcards.model]
    return Ask.of(model, attempt, getattr(wildcards, "size", OWN))


def held_mb(wildcards, attempt):
    return held(wildcards, attempt).mem_mb


def held_minutes(wildcards, attempt):
    return held(wildcards, attempt).runtime


def constraint(wildcards):
    return NODES.get(wildcards.host, Node()).constraint


def gres(wildcards):
    return NODES.get(wildcards.host, Node()).gres


def timed_threads(wildcards):
    """As its profile was probed with; of this machine's as the configuration says."""
    node = NODES.get(wildcards.host)
    return node.threads if node else SETTINGS.threads


# Snakemake loads those that are installed
PLUGIN = sys.modules.get("snakemake_executor_plugin_slurm")
if workflow.is_main_process and PLUGIN:
    ask_again(PLUGIN.Executor)
    # of a job with mem_mb=0, a measurement, the plugin says no memory, and a site's default would hold for it
    os.environ["SBATCH_MEM_PER_NODE"] = "0"


onstart:
    # a run that is alive has jobs here; where Slurm was never given any, it is not asked
    if ALONE and Path(".snakemake/slurm_logs").is_dir():
        try:
            left = cancel_orphans(os.getcwd())
        except UserError as exc:
            refuse(exc)
        if left:
            # while this run was planned they wrote files, of which a cancelled job removes its own: planned anew
            sys.stdout.flush()
            os.execv(sys.executable, sys.orig_argv)
