"""The jitted step, input, the loop."""
