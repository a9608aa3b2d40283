"""Bytes of device memory that somebody else has allocated, as torch sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


def bind_thread(device: int) -> None:
    """Makes the CUDA device's context current in this thread; without one UCX takes a path a hundred times slower.

    `set_device` alone does not: it returns at once where the runtime already counts the device as the
    thread's own, which device 0 is in every new thread. A call that needs a context binds it.
    """
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


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
