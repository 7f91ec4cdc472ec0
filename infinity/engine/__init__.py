"""The model: what the bytes mean."""
