"""PrefixRouter: which replica of an engine gets a request, so that prompts that begin alike meet the same prefix cache.

    router = PrefixRouter()
    router.set_replicas(["a", "b"])
    keys = prefix_keys(prompt, salt)
    best, *others = router.choose(keys)       # others: where to go if `best` has just died
    router.started(best); ...; router.finished(best)

A prompt is cut into blocks and every block's key hashes all text up to its end, so two prompts share their first n keys
exactly if they share their first n blocks. The table remembers for a key which replicas were sent such a prompt (each
has the prefix in its cache, unless it was evicted meanwhile: a wrong guess costs a prefill, nothing else). The longest
known prefix wins; among the replicas that hold it, the least loaded. If it has over `spill` requests more than the
least loaded of all, the latter is chosen: then it holds the prefix too, and from there on they share the load. So a
system prompt that all requests begin with ends up on all replicas, and only under load.

A replica that joins busy ones has an empty cache and must not get all requests that come next because it alone is idle.
Its load counts as that of the least loaded of the others, and by one less for each request that it has ended.

No torch, no Ray, no clock: the same calls give the same choices.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

BLOCK_CHARS = 128  # about 32 tokens of English; half a block of the KV cache on a GPU, whose first ones matter most
BLOCK_TOKENS = 32
MAX_BLOCKS = 64  # 8,192 characters: what begins alike for so long is the same conversation


def prefix_keys(prompt: str | Sequence[int], salt: str = "") -> tuple[bytes, ...]:
    """A key for each whole block at the beginning. Prompts of different salts share no cache, hence no key."""
    if isinstance(prompt, str):
        data, size = prompt.encode("utf-32-le", "surrogatepass"), 4 * BLOCK_CHARS
    else:
        tokens = islice(prompt, MAX_BLOCKS * BLOCK_TOKENS)
        data, size = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens), 8 * BLOCK_TOKENS
    keys = []
    kind = b"text" if isinstance(prompt, str) else b"ids"
    key = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=kind).digest()
    for end in range(size, min(len(data), MAX_BLOCKS * size) + 1, size):
        key = hashlib.blake2b(data[end - size : end], digest_size=16, key=key).digest()
        keys.append(key)
    return tuple(keys)


def body_keys(body: bytes) -> tuple[bytes, ...]:
    """Of a request as it came in. What cannot be read has no keys: the replica that gets it answers with the error."""
    try:
        fields = json.loads(body)
        if not isinstance(fields, Mapping):
            return ()
        salt = fields.get("cache_salt") or ""
        return prefix_keys(_beginning(fields), salt if isinstance(salt, str) else "")
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return ()


def _beginning(fields: Mapping[str, Any]) -> str | list[int]:
    """The prompt, or the first of several; of a chat its messages one after another, so that a conversation's next turn
    begins with all of the last one. /v1/responses calls them input."""
    if turns := fields.get("messages") or fields.get("input"):
        # Templates put tools first, then what holds for the whole conversation
        parts = [fields[name] for name in ("tools", "instructions", "system") if fields.get(name)]
        turns = [turns] if isinstance(turns, str) else turns
        return "".join(json.dumps(part, sort_keys=True) for part in (*parts, *turns))
    prompt = fields.get("prompt") or ""
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt


def keeper_of(path: str, body: bytes) -> str:
    """The replica that keeps the response which a request names, by the end of its id (responses.py); "": none. The id
    is found wherever it stands: after a wrong guess the replica answers 404, as any other would."""
    if not path.startswith("/v1/responses"):
        return ""
    found = re.search(rb'"previous_response_id"\s*:\s*"(resp_\w+)"', body) or re.search(rb"/(resp_\w+)", path.encode())
    return found[1].decode().removeprefix("resp_").partition("_")[2] if found else ""


class PrefixRouter:
    """A replica is any hashable id. `max_entries` keys are remembered, the least recently used are forgotten."""

    def __init__(self, max_entries: int = 65536, spill: int = 8) -> None:
        assert max_entries >= 1
        assert spill >= 0
        self.max_entries = max_entries
        self.spill = spill
        self.loads: dict[Hashable, int] = {}  # requests under way, of the replicas there are
        self._handicaps: dict[Hashable, int] = {}  # requests that a new replica counts as having on top
        self._last_chosen: dict[Hashable, int] = {}  # in which call of `choose`
        self._num_choices = 0
        self._holders: OrderedDict[bytes, list[Hashable]] = OrderedDict()  # key -> replicas, oldest key first

    def __len__(self) -> int:
        return len(self._holders)

    def set_replicas(self, replicas: Iterable[Hashable]) -> None:
        """Forgets what replicas held that are gone; a new one holds nothing yet."""
        before = self.loads
        self.loads = {replica: before.get(replica, 0) for replica in replicas}
        least = min((load for replica, load in self.loads.items() if replica in before), default=0)
        self._handicaps = {new: self._handicaps.get(new, 0 if new in before else least) for new in self.loads}
        self._last_chosen = {replica: self._last_chosen.get(replica, 0) for replica in self.loads}
        for key, holders in list(self._holders.items()):
            kept = [replica for replica in holders if replica in self.loads]
            if kept:
                self._holders[key] = kept
            else:
                del self._holders[key]

    def choose(self, keys: Sequence[bytes]) -> list[Hashable]:
        """All replicas, best first; the first one counts as chosen and is remembered for the keys."""
        if not self.loads:
            return []
        # Equally loaded ones take turns, or an idle service would put every new prompt on the same replica.
        loads = self._weigh()
        order = sorted(loads, key=lambda replica: (loads[replica], self._last_chosen[replica]))
        holders = next((self._holders[key] for key in reversed(keys) if key in self._holders), [])
        preferred = min(holders, key=lambda replica: loads[replica], default=None)
        if preferred is not None and loads[preferred] - loads[order[0]] <= self.spill:
            order.remove(preferred)
            order.insert(0, preferred)
        self._num_choices += 1
        self._last_chosen[order[0]] = self._num_choices
        self._remember(keys, order[0])
        return order

    def _weigh(self) -> dict[Hashable, int]:
        """The loads with handicaps; a handicap is at most the smallest load of the others now."""
        least = min((load for replica, load in self.loads.items() if not self._handicaps[replica]), default=0)
        return {replica: load + min(self._handicaps[replica], least) for replica, load in self.loads.items()}

    def started(self, replica: Hashable) -> None:
        if replica in self.loads:
            self.loads[replica] += 1

    def finished(self, replica: Hashable) -> None:
        if self.loads.get(replica, 0) > 0:  # it may have left and come back between the two calls
            self.loads[replica] -= 1
            self._handicaps[replica] = max(0, self._handicaps[replica] - 1)

    def _remember(self, keys: Sequence[bytes], replica: Hashable) -> None:
        for key in reversed(keys):  # the first block is the newest: a chain is forgotten from its end
            holders = self._holders.setdefault(key, [])
            if replica not in holders:
                holders.append(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self.max_entries:
            self._holders.popitem(last=False)
