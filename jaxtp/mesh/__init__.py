"""Axis names and sizes, device kinds, and the construction of meshes."""
