"""Files: checkpoints that any mesh can read, Hugging Face folders, shape listings.

In: arrays and a plan. Out: files, and back. Never knows: training.
"""
