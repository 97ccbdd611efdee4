"""The embedded reference models: their texts, recipe, training and packing."""
