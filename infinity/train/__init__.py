"""Train a GPT on text, with its state on device, host and NVMe."""
