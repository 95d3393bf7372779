"""jaxtp: automatic tensor parallelism for Flax models, proven on the compiled GPU program.

The front door. `__init__.pyi` lists every public name beside the module that holds it; each is
imported when it is first used, so that a program or a command pays only for what it needs.
"""

import lazy_loader

__version__ = "0.1.0"
"""As in pyproject.toml."""

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
