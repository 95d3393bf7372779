"""The command line: `jaxtp plan, explain, view, preflight, probe, errors`.

In: arguments. Out: text, pages and exit codes. Never knows: how anything is decided; a command is
one call of the library.
"""
