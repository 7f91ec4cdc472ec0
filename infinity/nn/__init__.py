"""Layers in tiles and a loss without full logits; plain PyTorch, which works with the engine and without it."""
