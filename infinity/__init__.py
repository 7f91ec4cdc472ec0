"""infinity: train PyTorch models larger than accelerator memory, and larger than RAM."""
