"""What an engine process and its client say to each other: msgpack frames over a Unix stream socket.

A frame is a 4-byte big-endian length and as many bytes of msgpack: one tagged struct of `Command` (client to
engine) or `Event` (engine to client). Both sides refuse a frame above `MAX_FRAME_BYTES` before they hold it
in memory. Values are plain data, decoded against the types below; nothing that is read can execute.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import msgspec

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import AdapterState, EngineRequest, TokenEvent

MAX_FRAME_BYTES = 32 * 1024 * 1024
"""Above any legal frame: a prompt of a million tokens takes 5 MB."""

HEARTBEAT_INTERVAL_S = 1.0
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""The sizes by which `EngineStats` counts steps: the bounds of vLLM's vllm:iteration_tokens_total."""

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size


class ProtocolError(Exception):
    """The other side broke the framing, or sent something that is not one of its messages."""


class FrameTooLarge(ProtocolError):
    """A frame above `MAX_FRAME_BYTES`."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine tells of itself. Sizes in bytes, tokens, blocks or pages as named."""

    model_name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    device: str
    dtype: str
    block_size: int
    num_kv_blocks: int
    kv_bytes: int
    arena_page_bytes: int
    arena_pages: int
    adapter_cpu_bytes: int
    max_adapter_rank: int
    max_num_seqs: int
    max_waiting: int
    max_num_batched_tokens: int = 0
    decoder: str = ""
    """Which implementation runs the model: "fused" or "transformers"."""
    base_fingerprint: str = ""
    sites: tuple[str, ...] = ()
    """Module names that adapters may target, such as "q_proj"."""


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant's share as the fair queue sees it. `counter` is its virtual token counter."""

    running: int = 0
    waiting: int = 0
    counter: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of this moment and counters since the engine process began. Prefix-cache figures in tokens."""

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0
    num_preemptions: int = 0
    num_out_of_memory: int = 0
    """Steps that did not fit into the device's memory."""
    num_steps: int = 0
    steps_by_tokens: tuple[int, ...] = ()
    """Steps that were computed, by tokens: of up to each of `STEP_TOKENS`, and above the bound before it; last, of
    more than all. A step's tokens are the prompt tokens that it computes and the output tokens that it draws."""
    num_step_tokens: int = 0
    """The tokens of those steps."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_arena_pages: int = 0
    num_arena_pages_used: int = 0
    host_bytes: int = 0
    host_bytes_used: int = 0
    num_leases: int = 0
    running_adapters: tuple[str, ...] = ()
    """Digests of the adapters with a running sequence."""
    waiting_adapters: tuple[str, ...] = ()
    tenants: dict[str, TenantStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Where one adapter version is. `state` is hot (device), warm (host memory) or cold (disk only);
    `load_seconds` is the last load's time by stage; `idle_s` is the time since its last use, None if never."""

    ref: AdapterRef
    state: AdapterState
    loading: bool = False
    pinned: bool = False
    leases: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    idle_s: float | None = None
    load_seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None


# Commands: client to engine.


class Add(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: tuple[str, ...]


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Keep this version on the device from now on; load it if it is not there."""

    call: int
    ref: AdapterRef


class Unpin(msgspec.Struct, frozen=True, tag=True):
    call: int
    digest: str


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Forget this version as soon as nothing that runs uses it."""

    call: int
    digest: str


class Prefetch(msgspec.Struct, frozen=True, tag=True):
    """Begin to load these versions to the device, as room allows; answers nothing."""

    refs: tuple[AdapterRef, ...]


class SetWeights(msgspec.Struct, frozen=True, tag=True):
    """These tenants' shares are others from now on, also for what waits and runs; answers nothing."""

    weights: dict[str, float]


class GetStats(msgspec.Struct, frozen=True, tag=True):
    call: int


class GetCache(msgspec.Struct, frozen=True, tag=True):
    call: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by the step thread, so that an answer shows that steps still pass."""

    call: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new, finish what runs within `drain_s` seconds, abort the rest, and exit with 0."""

    drain_s: float = 0.0


Command = Add | Abort | Pin | Unpin | Drop | Prefetch | SetWeights | GetStats | GetCache | Ping | Shutdown


# Events: engine to client.


class Starting(msgspec.Struct, frozen=True, tag=True):
    """Sent every second or so until `Ready` or `Fatal`."""

    stage: str
    elapsed_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Events(msgspec.Struct, frozen=True, tag=True):
    """What one step brought, or several where the client was slow to read: then merged by request."""

    events: tuple[TokenEvent, ...]


class ResidencyChanged(msgspec.Struct, frozen=True, tag=True):
    """New states by digest; "cold" means neither on the device nor in host memory."""

    states: dict[str, AdapterState]


class Damaged(msgspec.Struct, frozen=True, tag=True):
    """Loads found the stored bytes of these versions damaged or lost; who waited for one has been told."""

    digests: tuple[str, ...]


class Stats(msgspec.Struct, frozen=True, tag=True):
    call: int
    stats: EngineStats


class Cache(msgspec.Struct, frozen=True, tag=True):
    call: int
    entries: tuple[CacheEntry, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The answer to Pin, Unpin, Drop; `error` says why it did not happen."""

    call: int
    error: str | None = None


class Pong(msgspec.Struct, frozen=True, tag=True):
    call: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent by the main thread every `HEARTBEAT_INTERVAL_S` from `Ready` on, unless earlier events still wait to be
    read. What the threads that compute have left of themselves: see `progress.Vitals`."""

    stalled_s: float
    longest_s: float
    unusual: bool


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on and exits. One line, for the person who started it."""

    message: str


Event = (
    Starting | Ready | Events | ResidencyChanged | Damaged | Stats | Cache | Done | Pong | Heartbeat | Fatal
)

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_frame(message: Command | Event) -> bytes:
    """One message as a frame. Raises FrameTooLarge."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    length = len(buffer) - HEADER_BYTES
    if length > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(buffer, 0, length)
    return bytes(buffer)


def frame_length(header: bytes | bytearray) -> int:
    """The payload's length from a frame's first 4 bytes. Raises FrameTooLarge."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
    return int(length)


def decode_command(payload: bytes | bytearray | memoryview) -> Command:
    """Raises ProtocolError where the payload is no command."""
    try:
        return _command_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a command: {error}") from error


def decode_event(payload: bytes | bytearray | memoryview) -> Event:
    """Raises ProtocolError where the payload is no event."""
    try:
        return _event_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not an event: {error}") from error


class FrameReader:
    """Cuts a byte stream into payloads. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes. Raises FrameTooLarge on the header alone."""
        self._buffer += data
        payloads = []
        position = 0
        while len(self._buffer) - position >= HEADER_BYTES:
            start = position + HEADER_BYTES
            end = start + frame_length(self._buffer[position:start])
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start:end]))
            position = end
        if position:
            del self._buffer[:position]
        return payloads
