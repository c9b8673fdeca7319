"""Stored formats of weight matrices: random codes, what they mean, and the same on the device.

Independent of the kernels and of the engine: numbers come from the formats' definitions, in double precision, by table.
"""

import numpy as np

from driver import Matrix

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(code):
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


E4M3 = np.array([e4m3(c) for c in range(256)])


def bf16_codes(values):
    """Upper halves of floats, rounded to nearest even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_values(codes):
    return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def shift(block):
    assert block & (block - 1) == 0
    return block.bit_length() - 1


class Weights:
    """A `[rows, cols]` matrix of one format: `values` in double precision, codes and scales as stored."""

    def __init__(self, rng, form, rows, cols, block=(128, 128)):
        self.form, self.rows, self.cols = form, rows, cols
        self.row_shift = self.col_shift = 0
        self.scales = np.zeros(0, np.uint8)
        spread = 1 / np.sqrt(cols)
        if form == "f32":
            self.codes = (rng.standard_normal((rows, cols)) * spread).astype(np.float32)
            self.values = self.codes.astype(np.float64)
        elif form == "bf16":
            self.codes = bf16_codes(rng.standard_normal((rows, cols)) * spread)
            self.values = bf16_values(self.codes)
        elif form == "fp8":
            # Every code but NaN, subnormals and both zeros among them.
            self.codes = rng.integers(0, 255, (rows, cols), np.uint8)
            self.codes[(self.codes & 0x7F) == 0x7F] = 1
            self.row_shift, self.col_shift = shift(block[0]), shift(block[1])
            grid = (-(-rows // block[0]), -(-cols // block[1]))
            self.scales = (rng.uniform(0.5, 1.5, grid) * spread / 100).astype(np.float32)
            wide = np.repeat(np.repeat(self.scales, block[0], 0)[:rows], block[1], 1)[:, :cols]
            self.values = (E4M3[self.codes].astype(np.float32) * wide).astype(np.float64)
        elif form == "int4":
            nibbles = rng.integers(0, 16, (rows, cols), np.uint8)
            self.codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
            self.col_shift = 5
            self.scales = bf16_codes(rng.uniform(0.5, 1.5, (rows, cols // 32)) * spread / 8)
            wide = np.repeat(bf16_values(self.scales), 32, 1)
            self.values = (nibbles.astype(np.float64) - 8) * wide
        elif form == "mxfp4":
            nibbles = rng.integers(0, 16, (rows, cols), np.uint8)
            self.codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
            self.col_shift = 5
            self.scales = rng.integers(118, 124, (rows, cols // 32), np.uint8)
            wide = np.repeat(2.0 ** (self.scales.astype(np.float64) - 127), 32, 1)
            self.values = E2M1[nibbles] * wide
        else:
            raise ValueError(form)

    def stored_bytes(self):
        return self.codes.nbytes + self.scales.nbytes

    def upload(self, device):
        scales = device.put(self.scales) if self.scales.size else 0
        return Matrix(device.put(self.codes), scales, self.rows, self.cols, self.row_shift, self.col_shift)


def scale_loads(form, rows, cols):
    """Bytes of scales that chunks of 16 columns load: one a chunk, whatever the block."""
    each = {"fp8": 4, "int4": 2, "mxfp4": 1}.get(form, 0)
    return rows * -(-cols // 16) * each
