# What a cluster needs to know of this run (docs/cluster.md): how large its jobs are, which nodes are hosts, and which
# jobs a killed run left behind.

from engine.cluster import Ask, Node, nodes
from evals.cluster import cancel_orphans

NODES = nodes(SETTINGS.hosts)


def held_mb(wildcards, attempt):
    """Of a job that holds the model."""
    return Ask.of(SETTINGS.models[wildcards.model], attempt).mem_mb


def held_minutes(wildcards, attempt):
    return Ask.of(SETTINGS.models[wildcards.model], attempt).runtime


def constraint(wildcards):
    return NODES.get(wildcards.host, Node()).constraint


def gres(wildcards):
    return NODES.get(wildcards.host, Node()).gres


def timed_threads(wildcards):
    """As its profile was probed with; of this machine's as the configuration says."""
    node = NODES.get(wildcards.host)
    return node.threads if node else SETTINGS.threads


onstart:
    cancel_orphans(os.getcwd())
