"""Made-up weights against the same function written out in numpy, bit for bit, and nothing beside them touched; and reading alone."""

import numpy as np

from checks import all_loaded, ceil, equal, in_every_order

MASK = 0xBFBFBFBFBFBFBFBF


def mix(x):
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def made(key, size, rule, parameter):
    """The bytes of a tensor, by rule: mask, centred nibbles, BF16, constant."""
    with np.errstate(over="ignore"):
        bits = mix(np.uint64(key) + np.arange(ceil(size, 8), dtype=np.uint64))
    if rule == 0:
        words = bits & np.uint64(parameter)
    elif rule == 1:
        nibbles = (bits[:, None] >> (np.arange(16, dtype=np.uint64) * np.uint64(4))) & np.uint64(15)
        nibbles[nibbles == 0] = 8
        words = (nibbles << (np.arange(16, dtype=np.uint64) * np.uint64(4))).sum(1, dtype=np.uint64)
    elif rule == 2:
        numbers = bits.view(np.int16).astype(np.float32) * np.uint32(parameter).view(np.float32)
        words = (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint64)
    else:
        words = np.full_like(bits, parameter)
    return words.view(np.uint8)[:size]


def check_made(device, rng):
    scale = int(np.float32(0.0123).view(np.uint32))
    for rule, parameter in ((0, MASK), (0, 2**64 - 1), (1, 0), (2, scale), (3, 0x3C003C003C003C00)):
        # Whole and cut words, one block and several; beginnings on a border of 8 and elsewhere.
        for size, offset in ((8, 16), (64, 0), (77, 24), (31, 5), (32768, 8), (100_003, 13), (70_000, 32)):
            key = int(rng.integers(0, 2**63)) * 2 + 1
            want = np.full(offset + size + 40, 0xA5, np.uint8)
            want[offset : offset + size] = made(key, size, rule, parameter)

            def run():
                at = device.put(np.full_like(want, 0xA5))
                device.launch("fill", ceil(size, 32768), 256, [at + offset, size, key, np.int32(rule), parameter])
                got = device.get(at, want.shape, np.uint8)
                device.free(at)
                return [got]

            equal(f"{size} made-up bytes at {offset} by rule {rule}", in_every_order(device, "made-up bytes", run)[0], want)


def check_stream(device, rng):
    for chunks, blocks in ((1, 1), (255, 1), (4096, 2), (10_000, 3)):
        places = {0, 16 * chunks - 1, int(rng.integers(0, 16 * chunks))}
        for at in (None, *sorted(places)):
            memory = np.zeros(16 * chunks, np.uint8)
            if at is not None:
                memory[at] = 1
            from_, seen = device.put(memory), device.put(np.zeros(1, np.int32))

            def run():
                device.copy_in(seen, np.zeros(1, np.int32))
                device.loaded()
                device.launch("stream_read", blocks, 256, [from_, chunks, seen])
                all_loaded(f"reading {chunks} chunks", device, 16 * chunks)
                return [device.get(seen, 1, np.int32)]

            equal(f"byte {at} of {chunks} chunks", in_every_order(device, "reading", run)[0][0], 0 if at is None else 1)
            device.free(from_, seen)


CHECKS = [check_made, check_stream]
