"""Evidence about parameters, and how it becomes a decision."""
