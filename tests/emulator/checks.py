"""What a parity test is made of: kernels run on a device, double-precision references beside them, and comparisons.

Every kernel runs in three orders of threads somewhere, at small shapes, and must leave the same bits: one whose result depends on the
order has a race. `parity.py` demands that of each; large shapes run in one order. Tolerances are relative to the sum of the magnitudes that were added, so that cancellation is not mistaken for an error.
"""

import numpy as np

ORDERS = (0, 1, 12345)


class Failure(Exception):
    pass


def same_bits(what, a, b):
    if a.shape != b.shape or a.tobytes() != b.tobytes():
        different = np.argwhere(np.atleast_1d(a != b))
        raise Failure(f"{what}: other bits, first at {different[0].tolist() if len(different) else 'NaN'}")


def close(what, got, want, size, share=2e-6):
    """`size`: the sum of the magnitudes that make each number."""
    got = got.astype(np.float64)
    if got.shape != np.shape(want):
        raise Failure(f"{what}: shape {got.shape}, not {np.shape(want)}")
    allowed = share * np.abs(size) + 1e-30
    off = np.abs(got - want)
    bad = ~(off <= allowed)
    if bad.any():
        at = tuple(np.argwhere(bad)[0])
        raise Failure(f"{what}: {bad.sum()} of {bad.size} numbers off, first at {at}: {got[at]:.9g}, not {want[at]:.9g} (allowed {np.broadcast_to(allowed, off.shape)[at]:.3g})")


def equal(what, got, want):
    if not np.array_equal(got, want):
        got, want = np.asarray(got), np.asarray(want)
        if got.shape == want.shape and got.size > 16:
            at = tuple(np.argwhere(got != want)[0])
            raise Failure(f"{what}: {(got != want).sum()} of {got.size} differ, first at {at}: {got[at]}, not {want[at]}")
        raise Failure(f"{what}: {got.tolist()}, not {want.tolist()}")


def all_loaded(what, device, wanted):
    """The weights that were loaded since `device.loaded()` are exactly these many bytes."""
    loaded = device.loaded()
    if loaded is not None and loaded != wanted:
        raise Failure(f"{what}: {loaded} bytes of weights loaded, not {wanted}")


def in_every_order(device, what, run):
    """`run` returns the arrays that a launch leaves; they must not depend on the order of threads."""
    first = None
    for order in ORDERS:
        device.order(order)
        results = run()
        if first is None:
            first = results
        else:
            for i, (a, b) in enumerate(zip(first, results)):
                same_bits(f"{what}, result {i}, threads in order {order}", a, b)
    device.order(0)
    return first


def padded(array):
    """Rows as the kernels read them, in single precision."""
    return np.ascontiguousarray(array, np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def ceil(a, b):
    return -(-a // b)
