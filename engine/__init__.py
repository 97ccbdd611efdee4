"""How a miss is handled: the decision, its state, the hook into transformers and the three instruments."""
