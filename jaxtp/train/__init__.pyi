"""Training: every public name and the module that holds it."""

from .loop import Hooks as Hooks
from .loop import fit as fit
from .preflight import preflight_config as preflight_config
from .setup import Setup as Setup
from .setup import prepare as prepare
from .whole_run import Finished as Finished
from .whole_run import run as run
