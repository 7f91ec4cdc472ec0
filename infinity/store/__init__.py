"""Where bytes are and how they move. Knows shards; no model."""
