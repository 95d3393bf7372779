"""The plan as frozen data: decisions, trees and paths, stages, the stored form of arrays.

In: shapes. Out: values that compare, print and travel as JSON. Never knows: devices, arrays on
them, how a decision is made.
"""
