"""Prices of a model that is known by its program alone: any function of parameters and inputs.

`program` flattens the traced step, `work` reads off it what one device computes and sends, `live`
what it holds, and `price` makes strategies of both dear or cheap, by the formulas of the room.
"""
