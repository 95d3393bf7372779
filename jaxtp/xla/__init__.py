"""Compile options, compiled programs as data, and compiling for GPUs that are not there."""
