"""One seed to every generator: named streams that do not disturb each other."""

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream called `names`: `derive(0, "actor", epoch)`."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
