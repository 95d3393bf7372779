"""Files: checkpoints that any mesh can read."""
