"""The vectors of the RFCs through the calls that the protocol makes."""

import pytest

from sparing.core.errors import SecureError
from sparing.secure.primitives import (
    chacha20,
    ed25519_public,
    ed25519_sign,
    ed25519_verifies,
    hkdf_sha256,
    seal,
    unseal,
    x25519,
    x25519_key,
    x25519_public,
)

SCALARS = [  # RFC 7748, 5.2: scalar, u, result
    (
        "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
        "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
        "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
    ),
    (
        "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
        "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
        "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
    ),
]
ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
SIGNATURES = [  # RFC 8032, 7.1: secret, public, message, signature
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
DERIVED = [  # RFC 5869, A.1 to A.3: key material, salt, info, result
    (
        "0b" * 22,
        bytes(range(13)).hex(),
        bytes(range(0xF0, 0xFA)).hex(),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)).hex(),
        bytes(range(0x60, 0xB0)).hex(),
        bytes(range(0xB0, 0x100)).hex(),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09da3275600c2f"
        "09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        "0b" * 22,
        "",
        "",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]
STREAMS = [  # RFC 8439, A.1, 1 to 4: key, block, its key stream; the nonce is zero
    (
        "00" * 32,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
]
SUNSCREEN = (
    "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b1a71de0a9e060b29"
    "05d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc3ff4def08e4b7a9de576d26586cec64b"
    "61161ae10b594f09e26a7e902ecbd0600691"
)


def raw(text: str) -> bytes:
    return bytes.fromhex(text)


@pytest.mark.parametrize(("scalar", "u", "result"), SCALARS)
def test_x25519(scalar, u, result):
    assert x25519(x25519_key(raw(scalar)), raw(u)).hex() == result


def test_x25519_a_thousand_times():
    k = u = raw("09" + "00" * 31)
    for i in range(1000):
        k, u = x25519(x25519_key(k), u), k
        if i == 0:
            assert k.hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert k.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


def test_x25519_of_two():
    alice, bob = x25519_public(raw(ALICE)), x25519_public(raw(BOB))
    assert alice.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert x25519(x25519_key(raw(ALICE)), bob).hex() == x25519(x25519_key(raw(BOB)), alice).hex() == shared


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31), bytes(31), bytes(33)])
def test_x25519_refuses_what_hides_nothing(public):
    with pytest.raises(SecureError):
        x25519(x25519_key(raw(ALICE)), public)


@pytest.mark.parametrize(("secret", "public", "message", "signature"), SIGNATURES)
def test_ed25519(secret, public, message, signature):
    assert ed25519_public(raw(secret)).hex() == public
    assert ed25519_sign(raw(secret), raw(message)).hex() == signature
    assert ed25519_verifies(raw(public), raw(message), raw(signature))
    assert not ed25519_verifies(raw(public), raw(message) + b"x", raw(signature))
    assert not ed25519_verifies(raw(public), raw(message), bytes([raw(signature)[0] ^ 1]) + raw(signature)[1:])


@pytest.mark.parametrize(("secret", "salt", "info", "result"), DERIVED)
def test_hkdf(secret, salt, info, result):
    assert hkdf_sha256(raw(secret), raw(salt), raw(info), len(result) // 2).hex() == result


@pytest.mark.parametrize(("key", "block", "result"), STREAMS)
def test_chacha20(key, block, result):
    assert chacha20(raw(key)).update(bytes(64 * (block + 1)))[64 * block :].hex() == result


def test_chacha20_poly1305():
    """RFC 8439, 2.8.2."""
    key, nonce = bytes(range(0x80, 0xA0)), raw("070000004041424344454647")
    about = raw("50515253c0c1c2c3c4c5c6c7")
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
        b"sunscreen would be it."
    )
    assert seal(key, text, about, nonce).hex() == SUNSCREEN
    assert unseal(key, raw(SUNSCREEN), about, nonce) == text
    assert unseal(key, raw(SUNSCREEN), about + b"x", nonce) is None
    assert unseal(key, raw(SUNSCREEN)[:-1] + b"\0", about, nonce) is None
