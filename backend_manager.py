"""The BackendManager under the name that people import: from backend_manager import BackendManager, Backend.

It stands in anyqlora/planning/backends.py, its table in anyqlora/planning/capabilities.py. The package never imports
this file.
"""

from anyqlora.planning.backends import *  # noqa: F403
