"""How a miss is handled: the decision, its state, the hook into transformers and the three instruments."""

import os

# Threads of torch's OpenMP spin while they wait, unless told before torch is imported. Beside any other load on the
# machine that makes a forward pass up to ten times slower; sleeping costs little where the machine is idle.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
