"""The memory that a run takes, predicted part by part from the shapes of its model."""

from anyqlora.planning.memory.estimate import *  # noqa: F403
