"""Client-level differential privacy, written from the formulas in plain NumPy, its noise included: keyed by the seed,
or from a secret, by HKDF (RFC 5869) in a few lines and ChaCha20."""

import hashlib
import hmac
import json

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def words(seed, t, client, tag, n):
    """n 64-bit words of (seed, round, client, tag); client -1 is everyone."""
    digest = hashlib.blake2b(f"{seed}/{t}/{tag}".encode(), digest_size=8).digest()
    who = np.array([client], dtype=np.int64).view(np.uint64)
    key = mix(mix(who * GOLDEN + np.uint64(1)) ^ np.uint64(int.from_bytes(digest, "little")))
    return mix(key + np.arange(1, n + 1, dtype=np.uint64) * GOLDEN)


def hkdf(key, salt, about):
    """RFC 5869 with SHA-256, for 32 bytes."""
    extracted = hmac.new(salt, key, hashlib.sha256).digest()
    return hmac.new(extracted, json.dumps(about).encode() + b"\x01", hashlib.sha256).digest()


def secret_words(secret, t, client, tag, n, values, scale):
    """n words for these values and this standard deviation; a client draws from a secret derived for it."""
    salt = hashlib.sha256(b"sparing/secret/" + secret).digest()
    row = np.append(np.asarray(values, dtype="<f8").ravel(), scale)
    own = secret if client == -1 else hkdf(secret, salt, ["client", client])
    return stream(hkdf(own, salt, [t, client, tag, hashlib.sha256(row.tobytes()).hexdigest()]), n)


def shared_words(secret, t, client, tag, n):
    """n words that a client and whoever has the run's secret can draw, without the values."""
    salt = hashlib.sha256(b"sparing/secret/" + secret).digest()
    shared = hkdf(secret, salt, ["client and server", client])
    return stream(hkdf(shared, b"", [t, client, tag, ""]), n)


def stream(key, n):
    return np.frombuffer(Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * n)), "<u8")


def normals(seed, t, client, tag, n):
    """Standard normal numbers by the seed."""
    return from_words(words(seed, t, client, tag, n + n % 2), n)


def secret_normals(secret, t, client, tag, values, scale):
    """The same by a secret, for these values."""
    n = np.size(values)
    return from_words(secret_words(secret, t, client, tag, n + n % 2, values, scale), n).reshape(np.shape(values))


def from_words(w, n):
    """Box-Muller: 52 bits for the radius; 52 bits and 2 more for the angle."""
    first, second = np.split(w, 2)
    u = ((first >> np.uint64(12)).astype(float) + 0.5) / 2**52
    v = ((second >> np.uint64(12)).astype(float) + 0.5) / 2**52
    angle = (v - 0.5 + (second & np.uint64(3)).astype(float)) * np.pi / 2
    radius = np.sqrt(-2 * np.log(u))
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n]


def length(update):
    return np.sqrt(sum((x**2).sum() for x in update.values()))


def clipped(update, bound):
    factor = min(1.0, bound / max(length(update), 1e-300))
    return {name: x * factor for name, x in update.items()}


def central(model, updates, bound, noise, seed, t):
    """The model after a round in which these updates arrived: (sum + noise) / m."""
    m, out = len(updates), {}
    sent = [clipped(u, bound) for u in updates]
    for name, x in model.items():
        drawn = normals(seed, t, -1, f"dp/{name}", x.size).reshape(x.shape)
        out[name] = x + (sum(u[name] for u in sent) + noise * bound * drawn) / m
    return out


def local(model, updates, bound, noise, seed, t):
    """`updates` by client: each clipped and noised for itself, then a plain mean."""
    sent = []
    for k, u in updates.items():
        u = clipped(u, bound)
        drawn = {n: normals(seed, t, k, f"dp/{n}", x.size).reshape(x.shape) for n, x in u.items()}
        sent.append({n: x + noise * bound * drawn[n] for n, x in u.items()})
    return {name: x + sum(u[name] for u in sent) / len(sent) for name, x in model.items()}


def split(noise, count_noise):
    """The part of the noise that updates get: 1 / z^2 = 1 / z_u^2 + 1 / (2 s)^2."""
    return 1 / np.sqrt(1 / noise**2 - 1 / (2 * count_noise) ** 2)


def next_bound(bound, updates, count_noise, quantile, rate, seed, t):
    within = sum(length(u) <= bound for u in updates)
    share = (within + count_noise * normals(seed, t, -1, "dp within", 1)[0]) / len(updates)
    return bound * np.exp(-rate * (share - quantile))


def gaussian_epsilon(noise, rounds, delta, orders):
    """Rényi accounting of `rounds` Gaussian mechanisms in which replacing one client moves the sum by 2 / noise."""
    sensitivity = 2 / noise
    best = np.inf
    for a in orders:
        divergence = rounds * a * sensitivity**2 / 2
        best = min(best, divergence + np.log((a - 1) / a) - np.log(delta * a) / (a - 1))
    return best
