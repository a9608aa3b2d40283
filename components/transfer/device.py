"""Bytes of device memory that somebody else has allocated, as torch sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


class DeviceBytes:
    """`num_bytes` at `address` of a CUDA device of this process."""

    def __init__(self, address: int, num_bytes: int, device: int) -> None:
        view: dict[str, Any] = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = view
        self._device = torch.device("cuda", device)

    def write(self, values: Bytes) -> None:
        """Replaces all of it; returns when it is there."""
        self._view().copy_(torch.from_numpy(np.ascontiguousarray(values)))
        torch.cuda.synchronize(self._device)

    def read(self) -> Bytes:
        """A copy in host memory."""
        copied: Bytes = self._view().cpu().numpy()
        return copied

    def _view(self) -> torch.Tensor:
        return torch.as_tensor(self, device=self._device)
