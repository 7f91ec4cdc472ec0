"""Say what this machine offers to training, what is slow or missing, and the command that mends it."""
