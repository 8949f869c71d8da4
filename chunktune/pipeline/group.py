"""One group of worker processes: its store, its data channel, its control channel, and its last words.

The store belongs to the launcher and outlives the workers, so what a dying group leaves there is read by the
next one. Agreement runs over gloo on the CPU, never over the device.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from chunktune.blame import place_in
from chunktune.device import Device

# Long, since a deadline of our own ends a hung group much earlier and says why.
GROUP_TIMEOUT = timedelta(hours=12)
STORE_TIMEOUT = timedelta(minutes=5)
_OUTCOME, _AT = "chunktune/outcome", "chunktune/at"
EXIT_LOST = 7
"""A worker whose group cannot go on ends with this; the launcher starts the group again."""
PEER_GRACE_S = 1.0
"""What a worker waits before it ends for a peer's sake: the agent names the first it finds dead, and ends the rest."""
TIMEOUT_GRACE_S, LOCKED_AFTER_S = 3.0, 2.0
"""What a worker waits after its deadline before it ends, and after what one that holds the interpreter's lock is
made to write its stack: before the agent ends it for the others' sake."""
NODE_GRACE_S = 20.0
"""The same where peers are on other nodes: torch's rendezvous counts an agent that died as there for 15 s
(`keep_alive_interval` times `keep_alive_max_attempt`), and one that meets it there ends for good."""


@dataclass(frozen=True)
class Place:
    """Where a worker stands, as the launcher's environment says."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int
    agent_store: bool
    run_id: str = ""

    @property
    def peer_grace_s(self) -> float:
        """What this worker waits before it ends for a peer's sake; its agent ends it at once where it knows better."""
        return PEER_GRACE_S if self.ranks == self.local_ranks else NODE_GRACE_S

    @classmethod
    def from_environment(cls) -> Place:
        """Read the variables that torch's launcher sets. Raises KeyError where one is missing."""
        env = os.environ
        return cls(
            rank=int(env["RANK"]),
            ranks=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_ranks=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            address=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run_id=env.get("TORCHELASTIC_RUN_ID", ""),
        )


def under_launcher() -> bool:
    """Whether this process was started by torch's elastic agent (torchrun), with a rank of its own."""
    return "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


def loopback_store(port: int = 0) -> dist.TCPStore:
    """A store that listens on 127.0.0.1 and nowhere else."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own loopback."""
    return address == "localhost" or address.startswith("127.") or address == "::1"


class Group:
    """The workers of one group. `generation`: how many groups of workers the store has seen, this one included."""

    def __init__(self, place: Place, device: Device) -> None:
        self.place = place
        self._device = device
        self.store = _connect(place)
        self.generation = agreed_generation(self.store, place.rank, place.ranks)
        self._opened = 0
        self._control: Any = None

    @property
    def reopened(self) -> bool:
        """Whether these processes have opened a group before."""
        return self._opened > 1

    def open(self) -> None:
        """Form the process group and its control channel; a new one each time, under keys of its own.

        torch's workers would otherwise read the addresses of the group that died from the store. No `device_id`: NCCL
        would then send everything between two ranks through the one communicator of the whole group, in order, where
        trainers have one for each pair (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, eagerInit_).
        """
        self._opened += 1
        if is_loopback(self.place.address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        cuda = self._device.kind == "cuda"
        dist.init_process_group(
            self._device.backend,
            store=dist.PrefixStore(f"chunktune/group/{self.generation}.{self._opened}", self.store),
            rank=self.place.rank,
            world_size=self.place.ranks,
            timeout=GROUP_TIMEOUT,
        )
        self._control = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        if cuda:
            dist.all_reduce(torch.zeros(1, device=self._device.torch_device))
            self._device.synchronise()

    def close(self) -> None:
        """Leave the process group in good order."""
        self._control = None
        dist.destroy_process_group()

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's value, on every rank, over the control channel."""
        everyone: list[Any] = [None] * self.place.ranks
        dist.all_gather_object(everyone, mine, group=self._control)
        return everyone

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank, over the control channel."""
        dist.barrier(group=self._control)

    def leave_note(self, note: dict[str, Any]) -> None:
        """Say in the store why this worker is about to end; the earliest note of a group is the reason."""
        full = {"rank": self.place.rank, "time_ns": time.time_ns(), **note}
        with contextlib.suppress(Exception):
            self.store.set(_note_key(self.generation, self.place.rank), json.dumps(full))

    def remember(self, chunks: int) -> None:
        """Say in the store which M runs now: a group that dies without a word died of it."""
        self.store.set(_AT, str(chunks))

    def note_of_previous(self) -> dict[str, Any] | None:
        """The first failure of the group before this one, by time; without one, the M that ran when it ended."""
        return first_note(self.store, self.generation - 1, self.place.ranks) or running_of(self.store)

    def tell(self, outcome: str, **more: str) -> None:
        """Say how the sweep, or this part of it, ended: the launcher reads it with `outcome_of`."""
        self.store.set(_OUTCOME, json.dumps({"outcome": outcome, **more}))

    def agree_on(self, key: str, mine: str) -> str:
        """The value that the first worker of this launch proposed for a key, restarts included.

        Where no agent lends its store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) this one lives no longer than its
        workers: then `mine` must be the same in every group.
        """
        name = f"chunktune/{key}"
        self.store.compare_set(name, "", mine)
        return str(self.store.get(name).decode())

    @contextlib.contextmanager
    def deadline(self, seconds: float, note: dict[str, Any], fatal: str | None = None) -> Iterator[None]:
        """End this process, with every thread's stack in the log, when the work inside takes longer.

        A hung pipeline frees its peers in no other way. The second, later alarm needs no interpreter lock.
        `fatal`: what failed, where the sweep cannot go on without it.
        """

        def expire() -> None:
            faulthandler.cancel_dump_traceback_later()
            if fatal is not None:
                self.tell("failed", type="UserCodeError", message=f"{fatal}: not done after {seconds:.0f} s")
            self.leave_note({"state": "timeout", **self._lateness(seconds), **note})
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            time.sleep(TIMEOUT_GRACE_S)
            os._exit(EXIT_LOST)

        alarm = threading.Timer(seconds, expire)
        alarm.daemon = True
        alarm.start()
        faulthandler.dump_traceback_later(seconds + LOCKED_AFTER_S, exit=True, file=sys.stderr)
        try:
            yield
        finally:
            alarm.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _lateness(self, seconds: float) -> dict[str, Any]:
        """Rank and reason of a note at the deadline; a rank that waits for another is not what took so long."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not None and waits_for_peer(frame):
            reason = f"not done after {seconds:.0f} s: every rank that could say so waits for another"
            return {"rank": None, "reason": reason, "waits": True, "after_s": seconds}
        place = place_in(frame)
        where = f", at {place}" if place else ""
        return {"reason": f"rank {self.place.rank} was not done after {seconds:.0f} s{where}"}


def waits_for_peer(frame: FrameType) -> bool:
    """Whether a thread with this innermost frame is inside a transfer or a collective.

    Over NCCL these return at once, and the wait is for the device.
    """
    file = Path(frame.f_code.co_filename)
    return file.is_relative_to(Path(dist.__file__).parent) or file == Path(torch.cuda.__file__)


def agreed_generation(store: dist.Store, rank: int, ranks: int) -> int:
    """The number of this group, 1 for the first that met at this store; collective.

    Rank 0 counts and tells every other rank that asks. Each asks under a name of its own, so that nobody takes the
    answer that one who is gone had asked for; torch's count of restarts would not do: it differs between agents, one
    of which may be new. Raises RuntimeError where a rank does not come within STORE_TIMEOUT.
    """
    if rank > 0:
        name = uuid.uuid4().hex
        store.set(f"chunktune/ask/{rank}", name)
        store.wait([f"chunktune/told/{name}"], STORE_TIMEOUT)
        number = int(store.get(f"chunktune/told/{name}"))
        store.set(f"chunktune/heard/{number}/{rank}", "1")
        return number
    number = int(store.add("chunktune/generation", 1))
    waiting, until_s = set(range(1, ranks)), time.monotonic() + STORE_TIMEOUT.total_seconds()
    while waiting:
        for other in sorted(waiting):
            if store.check([f"chunktune/heard/{number}/{other}"]):
                waiting.discard(other)
            elif store.check([f"chunktune/ask/{other}"]):
                store.set(f"chunktune/told/{store.get(f'chunktune/ask/{other}').decode()}", str(number))
        if time.monotonic() > until_s:
            raise RuntimeError(f"ranks {sorted(waiting)} did not come within {STORE_TIMEOUT}")
        time.sleep(0.005)
    return number


def _note_key(generation: int, rank: int) -> str:
    return f"chunktune/note/{generation}/{rank}"


def first_note(store: dist.Store, generation: int, ranks: int) -> dict[str, Any] | None:
    """What the workers of a group left when they ended: the earliest note, None where there is none.

    That of a rank which was waiting for others counts only where nobody says more; a single rank that then said
    nothing is what they waited for.
    """
    keys = [_note_key(generation, rank) for rank in range(ranks)]
    notes = [json.loads(store.get(key)) if store.check([key]) else None for key in keys]
    silent = [rank for rank, note in enumerate(notes) if note is None]
    said: list[dict[str, Any]] = [note for note in notes if note is not None]
    first = min(said, key=lambda note: (note.get("waits", False), note["time_ns"]), default=None)
    if first is None or not first.get("waits") or len(silent) != 1:
        return first
    reason = f"rank {silent[0]} was not done after {first['after_s']:.0f} s, and could not say where"
    return {**first, "rank": silent[0], "reason": reason}


def running_of(store: dist.Store) -> dict[str, Any] | None:
    """The M that ran last, as the beginning of a note; None where none did."""
    return {"chunks": int(store.get(_AT))} if store.check([_AT]) else None


def outcome_of(store: dist.Store) -> dict[str, str]:
    """How the workers of a launch ended, in their own words; empty where they said nothing."""
    if not store.check([_OUTCOME]):
        return {}
    words: dict[str, str] = json.loads(store.get(_OUTCOME))
    return words


def _connect(place: Place) -> dist.Store:
    if not place.agent_store and place.rank == 0:
        if is_loopback(place.address):
            return loopback_store(place.port)
        return dist.TCPStore(place.address, place.port, is_master=True, timeout=STORE_TIMEOUT)
    return dist.TCPStore(place.address, place.port, is_master=False, timeout=STORE_TIMEOUT)
