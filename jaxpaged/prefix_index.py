"""Which page holds which tokens: the digests behind the prefix cache.

A page's digest is SHA-256 over (digest of the page before it, its token ids), so it names the whole prefix up to its end.
The first page's parent is the digest of the tagged extras (salt, adapter), so that two salts never meet. Digests are never cut
short: equal digests are taken as equal prefixes. A page belongs to one KV group, so what is looked up is (group, digest).
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

PrefixKey = tuple[int, bytes]
"""KV group and digest."""


def root_digest(salt: str | None, adapter: str | None = None) -> bytes:
    """The parent of a first page. Each extra is tagged and carries its length, so that no two lists of extras run together."""
    root = hashlib.sha256(b"jaxpaged prefix 1")
    for tag, extra in ((b"salt", salt), (b"adapter", adapter)):
        if extra is not None:
            encoded = extra.encode("utf-8", "surrogatepass")
            root.update(tag + len(encoded).to_bytes(8, "little") + encoded)
    return root.digest()


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of one full page that follows the page with digest `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class PrefixChain:
    """One sequence's place in the prefix cache.

    Attributes:
        salt: only sequences with the same salt share pages.
        adapter: name of what is added to the weights; only sequences with the same one share pages.
        digests: of its first pages, as far as they were needed, so that no page is hashed twice.
        generation: that of the cache when its pages were matched. What is computed after a page of an older generation is
            itself of the older generation, and never shared.
    """

    __slots__ = ("adapter", "digests", "generation", "salt")

    def __init__(self, salt: str | None = None, adapter: str | None = None) -> None:
        self.salt, self.adapter = salt, adapter
        self.digests: list[bytes] = []
        self.generation = 0

    def extend(self, token_ids: Sequence[int], num_pages: int, page_size: int) -> None:
        """Makes sure that there are `num_pages` digests. Earlier ones are believed: a sequence's token ids only ever grow."""
        digests = self.digests
        for index in range(len(digests), num_pages):
            parent = digests[-1] if digests else root_digest(self.salt, self.adapter)
            digests.append(page_digest(parent, token_ids[index * page_size : (index + 1) * page_size]))


class PrefixIndex:
    """Two maps: key -> the one page that is registered for it, and page -> the key of what it holds.

    A page with a key is not always registered: of two sequences that computed the same page at the same time, the second
    keeps its page to itself.
    """

    def __init__(self, num_pages: int) -> None:
        self._page_of: dict[PrefixKey, int] = {}
        self._key_of: list[PrefixKey | None] = [None] * num_pages

    def __len__(self) -> int:
        return len(self._page_of)

    def find(self, key: PrefixKey) -> int | None:
        """The page registered for `key`."""
        return self._page_of.get(key)

    def has_key(self, page: int) -> bool:
        """Whether it is known what `page` is full of."""
        return self._key_of[page] is not None

    def is_registered(self, page: int) -> bool:
        """Whether `page` is the one that a match would find."""
        key = self._key_of[page]
        return key is not None and self._page_of.get(key) == page

    def record(self, page: int, key: PrefixKey) -> None:
        """Notes what `page` holds, and registers it unless another page already stands for the same prefix."""
        self._key_of[page] = key
        self._page_of.setdefault(key, page)

    def keep(self, page: int) -> bool:
        """Called when the last user of `page` lets go: whether it stays findable. A page that does not is forgotten.

        A private duplicate takes the entry if the registered page has been recycled meanwhile.
        """
        key = self._key_of[page]
        if key is not None and self._page_of.setdefault(key, page) == page:
            return True
        self._key_of[page] = None
        return False

    def forget(self, page: int) -> None:
        """Drops what is known of a page: it is about to hold something else, or is not to be shared any more."""
        key = self._key_of[page]
        if key is not None and self._page_of.get(key) == page:
            del self._page_of[key]
        self._key_of[page] = None

    def check(self, free: Iterable[int], idle: Iterable[int]) -> None:
        """Raises AssertionError unless the two maps agree, free pages have no key, and idle ones are found by theirs."""
        for key, page in self._page_of.items():
            assert self._key_of[page] == key, f"page {page} is registered for a prefix that it does not hold"
        for page in free:
            assert self._key_of[page] is None, f"free page {page} still has a key"
        for page in idle:
            assert self.is_registered(page), f"idle page {page} cannot be found"
