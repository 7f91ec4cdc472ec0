"""Look at, check, compare, export and prune the commits of a durable state."""
