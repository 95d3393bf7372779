"""The command line: `jaxtp plan`, `jaxtp preflight`, `jaxtp train` and so on, see `commands`.

In: arguments. Out: text, pages and exit codes. Never knows: how anything is decided; a command is
one call of the library.
"""
