"""The graph of a recipe's stages: keys, states, running, sweeps, garbage collection."""
