"""A StepPlan as bytes, and messages on a socket. Plain integers and JSON, never pickle: a plan is read, not executed.

A plan is one array of 64-bit integers (in this machine's byte order: both ends are on it), followed by the sampling
parameters of the sequences that arrive, as JSON. 256 decodes are 14 KB.

    step_id, num_steps, entries, arrivals, departures                                        five counts
    per entry: seq_id, start, num_new, first_block, samples; then all numbers of blocks; then all block ids
    departures
    per arrival: seq_id, num_prompt, seed, tokens, stop ids, bad words                       counts, then the ids

A message is its length (4 bytes), a letter for its kind, and the bytes.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from array import array
from itertools import chain
from operator import attrgetter

from nanovllm.errors import EngineDeadError
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.plan import Arrival, PlanEntry, StepPlan

HEADER = struct.Struct("<Ic")
MAX_BYTES = 1 << 30
FIELDS = attrgetter("seq_id", "start", "num_new", "first_block", "samples")
ENTRY = 5


def encode_plan(plan: StepPlan) -> bytes:
    entries = plan.entries
    numbers = array("q", (plan.step_id, plan.num_steps, len(entries), len(plan.arrivals), len(plan.departures)))
    blocks = [entry.block_ids for entry in entries]
    numbers.extend(chain.from_iterable(map(FIELDS, entries)))
    numbers.extend(map(len, blocks))
    numbers.extend(chain.from_iterable(blocks))
    numbers.extend(plan.departures)
    for arrival in plan.arrivals:
        numbers.extend(_arrival_numbers(arrival))
    params = json.dumps([dataclasses.asdict(arrival.params) for arrival in plan.arrivals]) if plan.arrivals else ""
    return struct.pack("<I", len(numbers)) + numbers.tobytes() + params.encode()


def _arrival_numbers(arrival: Arrival) -> list[int]:
    words = arrival.bad_words_ids
    counts = [len(arrival.token_ids), len(arrival.stop_ids), len(words), *map(len, words)]
    seed = arrival.seed - (1 << 64) if arrival.seed >= 1 << 63 else arrival.seed
    return [arrival.seq_id, arrival.num_prompt, seed, *counts, *arrival.token_ids, *arrival.stop_ids, *chain(*words)]


class _Reader:
    def __init__(self, numbers: array) -> None:
        self._numbers, self._next = numbers, 0

    def take(self, count: int) -> list[int]:
        found = self._numbers[self._next : self._next + count].tolist()
        if count < 0 or len(found) < count:
            raise EngineDeadError(f"a plan of {len(self._numbers)} numbers asks for {count} at {self._next}")
        self._next += count
        return found

    def at_end(self) -> bool:
        return self._next == len(self._numbers)


def decode_plan(data: bytes) -> StepPlan:
    count = struct.unpack_from("<I", data)[0]
    numbers = array("q")
    numbers.frombytes(data[4 : 4 + 8 * count])
    reader = _Reader(numbers)
    step_id, num_steps, num_entries, num_arrivals, num_departures = reader.take(5)
    flat, num_blocks = reader.take(ENTRY * num_entries), reader.take(num_entries)
    columns = (flat[i::ENTRY] for i in range(ENTRY))
    made = tuple(
        PlanEntry(seq_id, start, num_new, first, tuple(reader.take(num)) if num else (), bool(samples))
        for seq_id, start, num_new, first, samples, num in zip(*columns, num_blocks)
    )
    departures = tuple(reader.take(num_departures))
    params = json.loads(data[4 + 8 * count :]) if num_arrivals else []
    arrivals = tuple(_read_arrival(reader, SamplingParams(**params[i])) for i in range(num_arrivals))
    if not reader.at_end():
        raise EngineDeadError("a plan has numbers left over")
    return StepPlan(step_id, made, arrivals, departures, num_steps)


def _read_arrival(reader: _Reader, params: SamplingParams) -> Arrival:
    seq_id, num_prompt, seed, num_tokens, num_stops, num_words = reader.take(6)
    lengths = reader.take(num_words)
    token_ids, stop_ids = tuple(reader.take(num_tokens)), tuple(reader.take(num_stops))
    words = tuple(tuple(reader.take(length)) for length in lengths)
    return Arrival(seq_id, token_ids, num_prompt, params, seed % (1 << 64), stop_ids, words)


def send(connection: socket.socket, kind: bytes, data: bytes = b"") -> None:
    connection.sendall(HEADER.pack(len(data), kind) + data)


def receive(connection: socket.socket) -> tuple[bytes, bytes] | None:
    """(kind, data); None when the other end is gone."""
    header = _read(connection, HEADER.size)
    if header is None:
        return None
    length, kind = HEADER.unpack(header)
    if length > MAX_BYTES:
        raise EngineDeadError(f"a message of {length} bytes: at most {MAX_BYTES}")
    data = _read(connection, length)
    return None if data is None else (kind, data)


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(min(count - len(data), 1 << 20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
