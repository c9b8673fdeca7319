"""The CUDA driver's functions that the kernels' tests need, over ctypes: the emulator's, or a real driver's.

A `Device` owns a context, one loaded image and what was allocated. Arrays are numpy's and are copied in and out.
"""

import ctypes
import gzip

import numpy as np


class Matrix(ctypes.Structure):
    """`SpMatrix` of kernels/sp_matrix.cuh."""

    _fields_ = [("codes", ctypes.c_uint64), ("scales", ctypes.c_uint64), ("rows", ctypes.c_int), ("cols", ctypes.c_int),
                ("row_shift", ctypes.c_int), ("col_shift", ctypes.c_int)]


class Projections(ctypes.Structure):
    """`SpProjections` of kernels/dense.cu."""

    _fields_ = [("w", Matrix * 6), ("out", ctypes.c_uint64 * 6), ("stride", ctypes.c_int * 6), ("first", ctypes.c_int * 6), ("count", ctypes.c_int)]

    def __init__(self, outs, strides, first, matrices):
        super().__init__()
        self.count = len(matrices)
        for m, matrix in enumerate(matrices):
            self.w[m], self.out[m], self.stride[m], self.first[m] = matrix, outs[m], strides[m], int(first[m])


class Strides(ctypes.Structure):
    """`SpStrides` of kernels/experts.cu."""

    _fields_ = [("codes", ctypes.c_uint64), ("scales", ctypes.c_uint64)]


class Plan(ctypes.Structure):
    """`SpPlan` of kernels/experts.cu."""

    _fields_ = [(n, ctypes.c_uint64) for n in ("count", "expert", "start", "slot_row")]


class KdaRows(ctypes.Structure):
    """`SpKdaRows` of kernels/kda_mix.cu."""

    _fields_ = [(n, ctypes.c_uint64) for n in ("query", "keys", "values", "decays", "betas")]


class Delta(ctypes.Structure):
    """`SpDelta` of kernels/kda_delta.cu."""

    _fields_ = [("heads", ctypes.c_int), ("dim", ctypes.c_int)] + [(n, ctypes.c_uint64) for n in ("keys", "values", "decays", "betas")]


class Heads(ctypes.Structure):
    """`SpHeads` of kernels/mla_query.cu."""

    _fields_ = [(n, ctypes.c_int) for n in ("heads", "nope", "rope", "v")]


class Device:
    def __init__(self, library, image):
        self.lib = ctypes.CDLL(library)
        self.emulated = hasattr(self.lib, "emu_set_order")
        self.functions = {}
        # The orders of threads that each kernel ran in.
        self.current, self.orders = 0, {}
        self.calls = 0
        self._check("cuInit", 0)
        device = ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(64)
        self._check("cuDeviceGetName", name, 64, device)
        self.name = name.value.decode()
        context = ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._check("cuCtxSetCurrent", context)
        self.module = ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(self.module), gzip.decompress(image.read_bytes()))
        self.damage = self.put(np.zeros(1, np.int32))

    def _check(self, function, *args):
        code = getattr(self.lib, function)(*args)
        if code:
            raise RuntimeError(f"{function} failed with {code}")

    def put(self, array):
        """A device copy of `array`; its address."""
        array = np.ascontiguousarray(array)
        at = self.room(array.nbytes)
        self.copy_in(at, array)
        return at

    def copy_in(self, at, array):
        """Overwrites what is at `at`."""
        array = np.ascontiguousarray(array)
        self._check("cuMemcpyHtoD_v2", ctypes.c_uint64(at), array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes))

    def room(self, size):
        at = ctypes.c_uint64()
        self._check("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(size, 4)))
        return at.value

    def free(self, *addresses):
        for at in addresses:
            self._check("cuMemFree_v2", ctypes.c_uint64(at))

    def get(self, at, shape, dtype=np.float32):
        out = np.empty(shape, dtype)
        self._check("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(at), ctypes.c_size_t(out.nbytes))
        return out

    def launch(self, name, grid, block, args, shared=0):
        """Python ints are addresses, numpy scalars and structures are what they are."""
        if name not in self.functions:
            f = ctypes.c_void_p()
            self._check("cuModuleGetFunction", ctypes.byref(f), self.module, name.encode())
            self._check("cuFuncSetAttribute", f, 8, 160 * 1024 if shared > 48 * 1024 else 48 * 1024)
            self.functions[name] = f
        values = []
        for a in args:
            if isinstance(a, int):
                values.append(ctypes.c_uint64(a))
            elif isinstance(a, np.generic):
                values.append(np.ctypeslib.as_ctypes(a.reshape(1)))
            else:
                values.append(a)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        gx, gy, gz = (*grid, 1, 1)[:3] if isinstance(grid, tuple) else (grid, 1, 1)
        self._check("cuLaunchKernel", self.functions[name], gx, gy, gz, block, 1, 1, shared, None, pointers, None)
        self.calls += 1
        self.orders.setdefault(name, set()).add(self.current)

    def loaded(self):
        """Bytes of weights loaded since the last call; a real device does not say."""
        if not self.emulated:
            return None
        four = (ctypes.c_ulonglong * 4)()
        self.lib.emu_take_counters(four)
        return int(four[0])

    def order(self, order):
        """The order in which threads take turns from here on; a real device has its own."""
        self.current = order
        if self.emulated:
            self.lib.emu_set_order(ctypes.c_ulonglong(order))

    def damaged(self):
        """The site that was noted, 0 = none, which is taken back."""
        site = int(self.get(self.damage, 1, np.int32)[0])
        zero = np.zeros(1, np.int32)
        self._check("cuMemcpyHtoD_v2", ctypes.c_uint64(self.damage), zero.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(4))
        return site
