"""Identities: tokens in their one form, and the BLAKE3 domains that name layouts, namespaces and blocks.

Every derivation has a context string of its own, so that no two kinds of identity can collide. The context strings are
on disk in effect: changing one makes every stored id unreachable, so they change only with the format version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvstore.errors import TokensError, TokensTypeError

__all__ = [
    "ID_BYTES",
    "TokenArray",
    "Tokens",
    "as_tokens",
    "block_domain",
    "block_id",
    "common_tokens",
    "fingerprint",
    "image_tokens",
    "namespace_id",
    "salt_digest",
    "token_bytes",
]

TokenArray: TypeAlias = npt.NDArray[np.uint32]
Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

ID_BYTES = 32  # on disk

_LAYOUT_CONTEXT = "kvstore format 1 layout fingerprint"  # on disk
_SALT_CONTEXT = "kvstore format 1 salt digest"  # on disk
_NAMESPACE_CONTEXT = "kvstore format 1 namespace id"  # on disk
_BLOCK_CONTEXT = "kvstore format 1 block domain"  # on disk
_IMAGE_CONTEXT = "kvstore format 1 image tokens"  # on disk


def as_tokens(tokens: Tokens) -> TokenArray:
    """Bring tokens into their one form: a contiguous 1-D uint32 array.

    Parameters
    ----------
    tokens : sequence of int, or 1-D integer array
        A uint32 array that is contiguous already is returned as it is, not copied.

    Raises
    ------
    TokensTypeError
        When the elements are not integers.
    TokensError
        When they are empty, not 1-D, negative or 2**32 and above.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint32 and tokens.ndim == 1 and tokens.size:
        return np.ascontiguousarray(tokens)
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise TokensError(f"tokens must be a 1-D array of integers in [0, 2**32), got {type(tokens).__name__}: {error}") from error
    if array.ndim != 1:
        raise TokensError(f"tokens must be 1-D, got shape {array.shape}; pass one sequence at a time")
    if array.size == 0:
        raise TokensError("tokens are empty; a session has at least one token")
    if array.dtype == object and all(isinstance(t, int) and not isinstance(t, bool) for t in array.tolist()):
        raise TokensError("tokens must be in [0, 2**32), got integers that do not fit 64 bits")
    if array.dtype.kind not in "iu":
        raise TokensTypeError(f"tokens must be integers, got dtype {array.dtype}; convert them, e.g. with astype('uint32')")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 1 << 32:
        raise TokensError(f"tokens must be in [0, 2**32), got values from {low} to {high}")
    return np.ascontiguousarray(array, dtype=np.uint32)


def token_bytes(tokens: TokenArray) -> bytes:
    """The tokens as the index holds and compares them: uint32 little-endian."""
    return tokens.astype("<u4", copy=False).tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two runs of tokens (uint32 little-endian) share."""
    n = min(len(a), len(b)) // 4
    differing = np.flatnonzero(np.frombuffer(a, "<u4", n) != np.frombuffer(b, "<u4", n))
    return int(differing[0]) if differing.size else n


def image_tokens(digest: bytes, count: int) -> TokenArray:
    """Derive the token ids under which an image (or other non-text input) enters a prompt.

    The ids of all `count` positions depend on the digest and on `count`, so two images whose digests differ agree at no
    more positions than chance allows (2**-32 each), and a match never runs through another image.

    Parameters
    ----------
    digest : bytes
        A collision-resistant digest of the input, at least 16 bytes (of the encoder's input, not of the file).
    count : int
        How many positions the input takes in the prompt.
    """
    if len(digest) < 16:
        raise TokensError(f"an image's digest must be at least 16 bytes, got {len(digest)}; use the whole digest")
    if count < 1:
        raise TokensError(f"an image takes at least one position, got {count}")
    hasher = blake3(count.to_bytes(8, "little") + digest, derive_key_context=_IMAGE_CONTEXT)
    return np.frombuffer(hasher.digest(length=4 * count), dtype="<u4").astype(np.uint32)


def fingerprint(canonical: bytes) -> bytes:
    """Hash a layout's canonical encoding: 32 bytes that are the same in every process and on every machine."""
    return blake3(canonical, derive_key_context=_LAYOUT_CONTEXT).digest()


def salt_digest(salt: bytes) -> bytes:
    """Hash a salt: what is stored instead of it, since a salt may be a secret."""
    return blake3(salt, derive_key_context=_SALT_CONTEXT).digest()


def namespace_id(layout_fingerprint: bytes, digest: bytes) -> bytes:
    """Combine a layout's fingerprint and a salt's digest (32 bytes each) into the namespace's id."""
    return blake3(layout_fingerprint + digest, derive_key_context=_NAMESPACE_CONTEXT).digest()


def block_domain(namespace: bytes) -> bytes:
    """Derive the key under which the blocks of a namespace are hashed, so that namespaces share no block."""
    return blake3(namespace, derive_key_context=_BLOCK_CONTEXT).digest()


def block_id(domain: bytes, kind: int, tokens: int, payload: memoryview) -> bytes:
    """Hash one block: its kind, row count and payload in the domain of its namespace.

    The payload's geometry follows from the layout, which the domain stands for, and from the row count; its length is
    hashed as well. Releases the GIL while it hashes.
    """
    head = kind.to_bytes(4, "little") + tokens.to_bytes(4, "little") + payload.nbytes.to_bytes(8, "little")
    return blake3(head, key=domain).update(payload).digest()
