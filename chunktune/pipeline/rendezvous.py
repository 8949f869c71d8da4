"""How torch's elastic agent meets itself, on one machine and on loopback alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from chunktune.pipeline.group import loopback_store

BACKEND = "chunktune-loopback"


class LoopbackRendezvous(RendezvousHandler):
    """A meeting of one agent with itself: a store on 127.0.0.1 that outlives the workers.

    torch's own backends let their store listen on every interface.
    """

    def __init__(self) -> None:
        self.store = loopback_store()
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        """The workers use this store too."""
        return True

    def get_backend(self) -> str:
        """Name of the backend."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """This node, alone, as rank 0 of 1."""
        place = RendezvousStoreInfo("127.0.0.1", self.store.port)
        return RendezvousInfo(self.store, 0, 1, place)

    def is_closed(self) -> bool:
        """Whether the launch is over."""
        return self._closed

    def set_closed(self) -> None:
        """End the launch."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody else joins."""
        return 0

    def get_run_id(self) -> str:
        """Name of the launch."""
        return "chunktune"

    def shutdown(self) -> bool:
        """Nothing to close: the store lives as long as this object."""
        return True


@contextmanager
def registered(handler: LoopbackRendezvous) -> Iterator[None]:
    """Let torch's launcher find the handler by name; its registry keeps the first maker of a name."""
    _current.append(handler)
    if not _registered_once:
        rendezvous_handler_registry.register(BACKEND, _current_handler)
        _registered_once.append(True)
    try:
        yield
    finally:
        _current.clear()


_current: list[LoopbackRendezvous] = []
_registered_once: list[bool] = []


def _current_handler(_: RendezvousParameters) -> RendezvousHandler:
    return _current[-1]
