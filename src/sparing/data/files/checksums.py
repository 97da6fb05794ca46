"""Checksums of the official datasets' content, unpacked, so that it does not matter in which wrapping it came.

They are compared before the content is parsed. CIFAR's Python version, which is pickled, is known by the MD5 sums that
its users have compared since it was published.
"""

import hashlib

from sparing.core.errors import DataError

_SHA256 = {
    "mnist/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "mnist/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "mnist/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "mnist/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "fashion-mnist/train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "fashion-mnist/train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "fashion-mnist/t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "fashion-mnist/t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    "cifar10/data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "cifar10/data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "cifar10/data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "cifar10/data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "cifar10/data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "cifar10/test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    "cifar100/train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
    "cifar100/test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
}
_MD5 = {
    "cifar10/data_batch_1": "c99cafc152244af753f735de768cd75f",
    "cifar10/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "cifar10/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "cifar10/data_batch_4": "634d18415352ddfa80567beed471001a",
    "cifar10/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "cifar10/test_batch": "40351d587109b95175f43aff81a1287e",
    "cifar100/train": "16019d7e3df5f24257cddd939b257f8d",
    "cifar100/test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}


def verify_checksum(key: str, content: bytes | memoryview, where: str) -> None:
    """Refuse content that is not the official one."""
    if key in _SHA256:
        kind, wanted, seen = "SHA-256", _SHA256[key], hashlib.sha256(content).hexdigest()
    else:
        kind, wanted, seen = "MD5", _MD5[key], hashlib.md5(content, usedforsecurity=False).hexdigest()
    if seen != wanted:
        raise DataError(
            f"{where} is not the official {key}: its {kind} is {seen[:12]}..., not {wanted[:12]}... "
            "(check=False takes it as it is)"
        )


def check_sample_count(where: str, seen: int, wanted: int) -> None:
    """Refuse a file that does not hold as many samples as the official one."""
    if seen != wanted:
        raise DataError(
            f"{where} is wrong-sized: it holds {seen:,} samples, the official one {wanted:,} "
            "(check=False takes it as it is)"
        )
