"""Rendezvous hashing (Thaler and Ravishankar, 1998): each key has an order of members of its own. Where a member comes
or goes, only the keys change that have it in front."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def key_of(*parts: bytes) -> int:
    """64 bits of what a key is made of; the same in every process."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(len(part).to_bytes(4, "big") + part)
    return int.from_bytes(hashed.digest(), "big")


def digest_key(digest: str) -> int:
    """The key of a version by its SHA-256 in hexadecimal, which is as good as random already."""
    return int(digest[:16], 16)


def score(key: int, member: int) -> int:
    """A member's score for a key; the highest comes first. splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    mixed = key ^ member
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def scores(keys: Sequence[int], members: Sequence[int]) -> NDArray[np.uint64]:
    """[keys, members]: `score` of each pair."""
    mixed = np.array(keys, np.uint64)[:, None] ^ np.array(members, np.uint64)[None, :]
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def first(key: int, members: Mapping[str, int]) -> str:
    """The first of at least one member, whose keys are given by name, in a key's order. Names decide between members
    of one key."""
    best, found = -1, ""
    for name, member in members.items():
        # `score`, without a call for each member: this runs for every request.
        mixed = key ^ member
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        mixed ^= mixed >> 31
        if mixed > best or (mixed == best and name > found):
            best, found = mixed, name
    return found
