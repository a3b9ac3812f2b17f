"""Which adapters are to stay on the device, and how much of it they may take.

Pins of all tenants together hold half of the device's memory for adapters and half of its places at most, those of one
tenant a quarter: whatever is pinned, everybody's adapters have the other half, and nobody takes all that there is to
pin. (One page and one place may always be held.) A pin whose adapter was never loaded has no size yet; where it turns
out to have no room, it holds nothing until other pins leave some, and its adapter comes and goes like any other.
"""

from __future__ import annotations

from loraplex.adapters.ref import AdapterRef


class Pins:
    """The pins of one device with `num_pages` and `num_slots`. `refs` are all, `held` those in effect, by digest;
    the latter with their pages."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self._pages, self._slots = num_pages, num_slots
        self.refs: dict[str, AdapterRef] = {}
        self.held: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def add(self, ref: AdapterRef) -> None:
        self.refs[ref.digest] = ref

    def remove(self, digest: str) -> bool:
        """Whether there was one."""
        self.held.pop(digest, None)
        self._sizes.pop(digest, None)
        return self.refs.pop(digest, None) is not None

    def learn(self, digest: str, num_pages: int) -> None:
        """A load has told an adapter's size."""
        if digest in self.refs:
            self._sizes[digest] = num_pages

    def may_come(self, ref: AdapterRef) -> bool:
        """Whether its pin may bring an adapter to the device: it has room there, or nobody knows its size yet."""
        num_pages = self._sizes.get(ref.digest)
        return num_pages is None or ref.digest in self.held or not self.why_not(ref, num_pages)

    def hold(self, digest: str, num_pages: int) -> bool:
        """An adapter is on the device, or about to be: whether its pin keeps it there."""
        ref = self.refs.get(digest)
        if ref is None or (digest not in self.held and self.why_not(ref, num_pages)):
            return False
        self.held[digest] = num_pages
        return True

    def let_go(self, digest: str) -> None:
        """It did not get to the device."""
        self.held.pop(digest, None)

    def why_not(self, ref: AdapterRef, num_pages: int) -> str:
        """Why a pin of so many pages can't be held beside those that are; empty if it can."""
        others = {digest: pages for digest, pages in self.held.items() if digest != ref.digest}
        own = {
            digest: pages for digest, pages in others.items() if self.refs[digest].tenant_id == ref.tenant_id
        }
        for pinned, part, whose in ((own, 4, "one tenant's"), (others, 2, "all")):
            pages, slots = max(1, self._pages // part), max(1, self._slots // part)
            if sum(pinned.values()) + num_pages > pages:
                return (
                    f"{whose} pins may hold {pages} of the device's {self._pages} pages for adapters: "
                    f"{sum(pinned.values())} are held, and it needs {num_pages}"
                )
            if len(pinned) >= slots:
                return f"{whose} pins may hold {slots} of the {self._slots} places on the device, and do"
        return ""
