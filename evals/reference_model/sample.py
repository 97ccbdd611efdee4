"""What a packed model writes: one continuation a prompt, shown in its card as it came.

Drawn from the model's own probabilities at TEMPERATURE, within the smallest set of tokens that holds TOP_P of them. One
seed, no choice among several.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from evals.reference_model import pack

PROMPTS = {
    "encyclopaedic": "The river Elbe",
    "code": "def read_lines(path):\n",
    "literary": "And it came to pass in those days, that",
    "word_problems": "Question: Nora has 12 pears and buys 3 bags of 4 pears. How many has she now?\nAnswer:",
}
NEW_TOKENS, TEMPERATURE, TOP_P, SEED = 90, 0.8, 0.95, 1


@torch.inference_mode()
def samples(packed: Path) -> dict[str, str]:
    """Prompt and continuation by topic."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "model"
        pack.unpack(packed, whole)
        tokenizer = AutoTokenizer.from_pretrained(whole)
        model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
    found = {}
    for topic, prompt in PROMPTS.items():
        torch.manual_seed(SEED)
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt)["input_ids"]]])
        written = model.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=TEMPERATURE, top_p=TOP_P, top_k=0
        )
        found[topic] = tokenizer.decode(written[0], skip_special_tokens=True)
    return found
