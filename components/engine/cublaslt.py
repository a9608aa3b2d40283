"""Matrix products through cuBLASLt, whose algorithms can be told apart there. Imported on CUDA hosts only.

https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import numpy as np
import torch
from nvmath import CudaDataType
from nvmath.bindings import cublas, cublasLt

from components.engine.products import Algorithm, Plan, Problem

_TYPES = {torch.bfloat16: CudaDataType.CUDA_R_16BF, torch.float16: CudaDataType.CUDA_R_16F}
_TRANSPOSED = 1  # CUBLAS_OP_T
_WORKSPACE_BYTES = 32 << 20
_MOST_GUESSES = 16


class CublasLt:
    """A handle of the library, with the room that algorithms work in."""

    def __init__(self, device: torch.device) -> None:
        self.handle = cublasLt.create()
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.version = int(cublasLt.get_version())  # algorithms mean nothing to another one

    def plan(self, problem: Problem) -> Plan | None:
        """A product as the library knows it; None if it is not one of 16-bit matrices."""
        return _Plan(self, problem) if problem.dtype in _TYPES else None


class _Plan:
    def __init__(self, library: CublasLt, problem: Problem) -> None:
        self._library = library
        self._product, self._layouts = 0, list[int]()  # what is made below must be destroyed
        kind = _TYPES[problem.dtype]
        self._product = cublasLt.matmul_desc_create(cublas.ComputeType.COMPUTE_32F, CudaDataType.CUDA_R_32F)
        transposed = np.array(_TRANSPOSED, np.int32)
        cublasLt.matmul_desc_set_attribute(
            self._product, cublasLt.MatmulDescAttribute.TRANSA, transposed.ctypes.data, transposed.nbytes
        )
        # Columns come first there: a row-major matrix is its own transpose, and out' = weight x'.
        for count, size in (
            (problem.outputs, problem.inputs),  # the weight
            (problem.rows, problem.inputs),  # x
            (problem.rows, problem.outputs),  # what stands there, and the outcome
        ):
            self._layouts.append(cublasLt.matrix_layout_create(kind, size, count, size))
        self._all_layouts = (*self._layouts, self._layouts[-1])
        self._factors = np.array([1.0, 1.0 if problem.is_added else 0.0], np.float32)  # of it, of what stood there
        self._alpha = self._factors.ctypes.data
        self._beta = self._alpha + self._factors.itemsize

    def __del__(self) -> None:
        for layout in self._layouts:
            cublasLt.matrix_layout_destroy(layout)
        if self._product:
            cublasLt.matmul_desc_destroy(self._product)

    def guesses(self) -> list[Algorithm]:
        """The likely best one first."""
        preference = cublasLt.matmul_preference_create()
        most = np.array(_WORKSPACE_BYTES, np.uint64)
        cublasLt.matmul_preference_set_attribute(
            preference, cublasLt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES, most.ctypes.data, most.nbytes
        )
        results = np.zeros(_MOST_GUESSES, cublasLt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        try:
            cublasLt.matmul_algo_get_heuristic(
                self._library.handle, self._product, *self._all_layouts, preference, len(results), results.ctypes.data,
                count.ctypes.data,
            )  # fmt: skip
        except cublasLt.cuBLASLtError:
            return []
        finally:
            cublasLt.matmul_preference_destroy(preference)
        found = [result["algo"]["data_"].copy() for result in results[: count[0]] if result["state"] == 0]
        return [algorithm for algorithm in found if self.can_use(algorithm)]

    def can_use(self, algorithm: Algorithm) -> bool:
        """Whether an algorithm, found for a like kind of product, is one for this kind."""
        result = np.zeros(1, cublasLt.matmul_heuristic_result_dtype)
        try:
            cublasLt.matmul_algo_check(
                self._library.handle, self._product, *self._all_layouts, algorithm.ctypes.data, result.ctypes.data
            )
        except cublasLt.cuBLASLtError:
            return False
        return int(result["workspace_size"][0]) <= _WORKSPACE_BYTES

    def run(self, algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Launches the product on the current stream; all are contiguous and aligned as torch allocates them."""
        assert all(matrix.is_contiguous() for matrix in (x, weight, out))
        of_weight, of_x, of_out, _ = self._all_layouts
        place = out.data_ptr()
        cublasLt.matmul(
            self._library.handle, self._product, self._alpha, weight.data_ptr(), of_weight, x.data_ptr(), of_x,
            self._beta, place, of_out, place, of_out, algorithm.ctypes.data, self._library.workspace.data_ptr(),
            _WORKSPACE_BYTES, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
