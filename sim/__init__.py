"""What the world is, and how long things take in it."""
