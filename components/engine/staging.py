"""Staging: numbers on their way to the GPU, through two pinned buffers in turn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class Staging:
    """One device buffer, filled before each step without waiting for it.

    The copy of one step may still be outstanding while the next is written, never that of the one before
    (at most two steps are under way), so two host buffers suffice.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device_buffer = torch.zeros(capacity, dtype=dtype, device=device)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(capacity, dtype=dtype, pin_memory=pinned) for _ in range(2)]

    def __len__(self) -> int:
        return len(self.device_buffer)

    def send(self, values: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> torch.Tensor:
        """The values on the device, there before whatever is launched next."""
        self._host.reverse()
        count = len(values)
        self._host[0].numpy()[:count] = values
        sent = self.device_buffer[:count]
        sent.copy_(self._host[0][:count], non_blocking=True)
        return sent
