"""What machine this is, what is under a path, and what of both this process may use."""
