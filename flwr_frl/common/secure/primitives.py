"""Cryptographic primitives of secure aggregation.

All are those of `cryptography` and PyCryptodome: X25519, Ed25519, HKDF-SHA256,
AES-256-GCM, AES-256-CTR as the generator of masks, and Shamir's shares in GF(2^128).
"""

import hashlib
import os
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Words = npt.NDArray[np.unsignedinteger]

# Separates these keys from those of other protocols and of later versions.
DOMAIN = b"flwr-frl secure aggregation 1"
# Bytes of a secret that is shared: a block of Shamir's scheme.
SEED = 16
# Bytes of a public key, of a truncated digest, and of the nonce of AES-GCM.
KEY, MARK, NONCE = 32, 16, 12
# Words that are masked at a time, so that the stream stays in the cache.
CHUNK = 2**18


def joined(parts: tuple[bytes, ...]) -> bytes:
    """Return parts as one text, from which they could be recovered."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def derive(secret: bytes, *about: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose (HKDF-SHA256)."""
    return HKDF(hashes.SHA256(), 32, None, joined((DOMAIN, *about))).derive(secret)


def mark(*parts: bytes) -> bytes:
    """Return the digest by which a seed or a share is recognised later."""
    return hashlib.sha256(joined((DOMAIN, *parts))).digest()[:MARK]


def key_pair(seed: bytes) -> tuple[x25519.X25519PrivateKey, bytes]:
    """Return the private and the public key that follow from a seed."""
    private = x25519.X25519PrivateKey.from_private_bytes(derive(seed, b"x25519"))
    return private, private.public_key().public_bytes_raw()


def agree(private: x25519.X25519PrivateKey, public: bytes, *about: bytes) -> bytes:
    """Return the key that two clients share; `ValueError` if the public one is weak."""
    other = x25519.X25519PublicKey.from_public_bytes(public)
    return derive(private.exchange(other), *about)


def is_key(public: bytes) -> bool:
    """Return whether a public key can be used: some give every client the same key."""
    try:
        agree(x25519.X25519PrivateKey.generate(), public)
    except ValueError:
        return False
    return True


def sign(key: ed25519.Ed25519PrivateKey, text: bytes) -> bytes:
    """Return the public key and the signature of a text."""
    return key.public_key().public_bytes_raw() + key.sign(text)


def is_signed(signed: bytes, text: bytes) -> bool:
    """Return whether a result of `sign` is of this text."""
    try:
        public = ed25519.Ed25519PublicKey.from_public_bytes(signed[:KEY])
        public.verify(signed[KEY:], text)
    except (InvalidSignature, ValueError):
        return False
    return True


def add_mask(words: Words, key: bytes, sign: int) -> None:
    """Add (1) or subtract (-1) a key's stream in place, modulo the size of a word.

    A key masks a single vector, so the counter starts at 0.
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(min(len(words), CHUNK) * words.itemsize)
    combine = np.add if sign > 0 else np.subtract
    # The same on machines of either byte order.
    little = words.dtype.newbyteorder("<")
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        mask = np.frombuffer(stream.update(zeros[: part.nbytes]), little)
        combine(part, mask, out=part)


def seal(key: bytes, plain: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate a text together with what it is about."""
    nonce = os.urandom(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, plain, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Return the text, empty if it was not sealed with this key, or was changed."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], about)
    except (InvalidTag, ValueError):
        return b""


def split(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Return shares of a secret, of which ``threshold`` reveal it."""
    return [share for _, share in Shamir.split(threshold, number, secret, False)]


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of shares by their position, from 1."""
    return bytes(Shamir.combine(sorted(shares.items())[:threshold], False))
