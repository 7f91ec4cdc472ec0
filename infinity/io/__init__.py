"""Asynchronous direct I/O on files. Knows bytes and files; neither tiers nor what tensors mean."""
