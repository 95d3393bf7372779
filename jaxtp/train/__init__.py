"""Training: the jitted step, the data, the loop, restarts, and `run`, which is all of them.

In: a `Config`. Out: a run. Never knows: the command line.

`__init__.pyi` lists the public names; each is imported when it is first used, for they bring Orbax
and Grain with them, which `jaxtp.jit_step` does not need.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
