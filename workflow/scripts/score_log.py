"""Score a decision log: run a text and execute exactly what the log says. Prints its perplexities as JSON.

python workflow/scripts/score_log.py --model-dir results/models/reference --text results/texts/bible_test.json \
    --log results/decisions/reference/quality_first/s25/bible_test.safetensors --context 1024
"""

import argparse
import json
import os

from engine.emulator import Replayer
from engine.errors import error, main_guard
from engine.hook import attach
from engine.log import count, load_log
from evals.jobs import Progress, load_model, load_texts, load_tokenizer, model_hash
from evals.perplexity import context_of, losses, perplexities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--text", required=True, help="the resolved text the log was written on")
    parser.add_argument("--documents", type=int, help="the first documents alone, if the log was written so")
    parser.add_argument("--log", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    a = parser.parse_args()
    log = load_log(a.log)
    tokenizer, bos = load_tokenizer(a.model_dir)
    (text,) = load_texts([a.text], tokenizer, bos, a.documents)
    if sum(text.scored) != len(log.executed):
        raise error(
            f"a log of {len(log.executed)} tokens", f"{sum(text.scored)} as in {text.id}", "give the log's own text"
        )
    for name, ours in (("model", model_hash(a.model_dir)), ("text_sha256", text.sha256)):
        if log.provenance.get(name, ours) != ours:
            raise error(f"{a.log}: {name} {log.provenance[name]}", f"{ours}", "give the log's own model and text")
    model = load_model(a.model_dir, a.dtype, a.threads)
    progress = Progress(f"score log on {text.id}", sum(text.scored))
    with attach(model) as attachment:
        replayer = Replayer(attachment, log)
        with replayer.phase("decode"):
            context = context_of(model, a.context)
            loss = losses(model, text.documents, context=context, bos=bos, progress=progress.advance)
    print(json.dumps({"text": text.id, "tokens": len(loss), **perplexities(loss, text.documents), **count(log)}))


if __name__ == "__main__":
    main_guard(main)
