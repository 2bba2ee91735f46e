"""Assigning a new token to a community by its gain in modularity."""

from kvstitch.kernels.community_update.api import Communities, community_update

__all__ = ["Communities", "community_update"]
