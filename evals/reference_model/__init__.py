"""The embedded reference models: their texts, recipe, training and packing.

recipe.py      config/reference_models.yaml, checked        model.py     shape, forward and backward pass
data.py        tokenizer, tokens, batches                   *_kernels.py rows, attention, router and experts, compiled
optimiser.py   Muon, AdamW, the schedule                    train.py     the loop; checkpoint.py: stop and go on
heldout.py     loss by topic on calibration texts           export.py    to transformers' names; pack.py: int8 and back
card.py        what the repository carries, with its card
"""
