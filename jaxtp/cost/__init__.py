"""What a step costs before anything is compiled: FLOPs, memory, the lower bound of the wire, time.

In: sizes, a plan, data sheets of GPUs. Out: numbers, each with its unit. Never knows: arrays,
devices, compiled programs.
"""
