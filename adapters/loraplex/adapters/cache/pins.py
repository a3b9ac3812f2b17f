"""Which adapters stay on the device, and their limits.

Pins of all tenants together hold at most half of the device memory for adapters and half of its slots, those of one
tenant at most a quarter. So the other half stays free for all adapters, and one tenant cannot use up the pins. (One
page and one slot may always be held.) The size of a pin whose adapter was never loaded is unknown. If it turns out not
to fit, the pin holds nothing until other pins are removed, and its adapter is loaded and evicted like any other.
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

    def register(self, ref: AdapterRef) -> None:
        self.refs[ref.digest] = ref

    def remove(self, digest: str) -> bool:
        """Returns whether there was one."""
        self.held.pop(digest, None)
        self._sizes.pop(digest, None)
        return self.refs.pop(digest, None) is not None

    def set_size(self, digest: str, num_pages: int) -> None:
        """Set an adapter's size after its load."""
        if digest in self.refs:
            self._sizes[digest] = num_pages

    def may_come(self, ref: AdapterRef) -> bool:
        """Whether the pin may load its adapter: it fits, or its size is unknown."""
        num_pages = self._sizes.get(ref.digest)
        return num_pages is None or ref.digest in self.held or not self.refusal(ref, num_pages)

    def hold(self, digest: str, num_pages: int) -> bool:
        """Whether its pin keeps an adapter on the device. Called when it is there, or about to be."""
        ref = self.refs.get(digest)
        if ref is None or (digest not in self.held and self.refusal(ref, num_pages)):
            return False
        self.held[digest] = num_pages
        return True

    def release(self, digest: str) -> None:
        """The copy to the device failed."""
        self.held.pop(digest, None)

    def refusal(self, ref: AdapterRef, num_pages: int) -> str:
        """Why a pin of `num_pages` pages cannot be held beside the present ones; empty if it can."""
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
                return f"{whose} pins may hold {slots} of the {self._slots} slots on the device, and do"
        return ""
