"""Which page holds which tokens: the digests behind the prefix cache.

A page's digest is SHA-256 over (digest of the page before it, its token ids), so it names the whole prefix up to its end.
The first page's parent is the digest of the tagged extras (a salt), so that two salts never meet. Digests are never cut
short: equal digests are taken as equal prefixes.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

UNSHARED = b""
"""Stands for the digest of a page that is full of tokens but may never be shared again; never equal to a real digest."""


def root_digest(salt: str | None) -> bytes:
    """The parent of a first page. Each extra is tagged and carries its length, so that no two lists of extras run together."""
    root = hashlib.sha256(b"jaxpaged prefix 1")
    if salt is not None:
        encoded = salt.encode("utf-8", "surrogatepass")
        root.update(b"salt" + len(encoded).to_bytes(8, "little") + encoded)
    return root.digest()


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of one full page that follows the page with digest `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_digests(digests: list[bytes], token_ids: Sequence[int], num_pages: int, page_size: int, salt: str | None) -> None:
    """Lengthens `digests`, the digests of the first pages of `token_ids`, to `num_pages` entries in place.

    Earlier entries are believed: a list belongs to one sequence, whose token ids only ever grow, and to one salt.
    """
    for index in range(len(digests), num_pages):
        parent = digests[-1] if digests else root_digest(salt)
        digests.append(page_digest(parent, token_ids[index * page_size : (index + 1) * page_size]))


class PrefixIndex:
    """Two maps: digest -> the one page that is registered for it, and page -> the digest of what it holds.

    A page with a digest is not always registered: of two sequences that computed the same page at the same time, the
    second keeps its page to itself.
    """

    def __init__(self, num_pages: int) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: list[bytes | None] = [None] * num_pages

    def __len__(self) -> int:
        return len(self._page_of)

    def find(self, digest: bytes) -> int | None:
        """The page registered for `digest`."""
        return self._page_of.get(digest)

    def digest(self, page: int) -> bytes | None:
        """The digest of what `page` holds, UNSHARED, or None while it is not known to be full."""
        return self._digest_of[page]

    def is_registered(self, page: int) -> bool:
        """Whether `page` is the one that a match would find."""
        digest = self._digest_of[page]
        return digest is not None and self._page_of.get(digest) == page

    def record(self, page: int, digest: bytes) -> None:
        """Notes what `page` holds, and registers it unless another page already stands for the same prefix."""
        self._digest_of[page] = digest
        if digest != UNSHARED:
            self._page_of.setdefault(digest, page)

    def keep(self, page: int) -> bool:
        """Called when the last user of `page` lets go: whether it stays findable. A page that does not is forgotten.

        A private duplicate takes the entry if the registered page has been recycled meanwhile.
        """
        digest = self._digest_of[page]
        if digest is not None and digest != UNSHARED and self._page_of.setdefault(digest, page) == page:
            return True
        self._digest_of[page] = None
        return False

    def forget(self, page: int) -> None:
        """Drops a registered page: it is about to hold something else."""
        digest = self._digest_of[page]
        if digest is not None and self._page_of.get(digest) == page:
            del self._page_of[digest]
        self._digest_of[page] = None

    def check(self, free: Iterable[int], idle: Iterable[int]) -> None:
        """Raises AssertionError unless the two maps agree, free pages have no digest, and idle ones are found by theirs."""
        for digest, page in self._page_of.items():
            assert self._digest_of[page] == digest, f"page {page} is registered for a prefix that it does not hold"
        for page in free:
            assert self._digest_of[page] is None, f"free page {page} still has a digest"
        for page in idle:
            assert self._page_of.get(self._digest_of[page] or UNSHARED) == page, f"idle page {page} cannot be found"
