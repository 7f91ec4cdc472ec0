"""What outlives a run: commits, checkpoints, and files that others read."""
