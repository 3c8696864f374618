"""Where the end of a text occurs earlier in it: the tokens that followed there are a guess at those that come next.

    tokens    the  cat  sat .  the  cat  |            the newest tokens, "the cat", occur at 0
    guess                                 sat  .  the

`find` compares the text with its own end, shifted to every earlier place e (the place of the last matching token). A
place is as good as the number of tokens that match, up to `longest`; below `shortest` it does not count. Of equally
long matches the latest that has `wanted` tokens after it is best, because it is most like the present; if none has, the
earliest, which has the most. One integer orders them, so that kernels can take a maximum:

    key(e) = matches * 2^26  +  (e has enough after it) * 2^25  +  (e if so, else 2^25 - 1 - e)
"""

from __future__ import annotations

import numpy as np

PLACES = 1 << 25  # longest text


def find(tokens: np.ndarray, shortest: int, longest: int, wanted: int) -> int:
    """Index of the first token of the guess; len(tokens) if there is none."""
    size = len(tokens)
    assert size < PLACES
    if size <= shortest:
        return size
    last = np.flatnonzero(tokens[: size - 1] == tokens[size - 1])  # places that match one token at least
    matches = np.ones(len(last), np.int64)
    places = np.arange(len(last))
    for back in range(1, longest):
        places = places[last[places] >= back]
        places = places[tokens[last[places] - back] == tokens[size - 1 - back]]
        if not len(places):
            break
        matches[places] += 1
    last, matches = last[matches >= shortest], matches[matches >= shortest]
    if not len(last):
        return size
    enough = last + wanted < size
    keys = (matches << 26) + np.where(enough, PLACES + last, PLACES - 1 - last)
    return int(last[np.argmax(keys)]) + 1
