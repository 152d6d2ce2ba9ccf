"""Energy consumption of a GPU, from NVIDIA's management library, if nvidia-ml-py and the driver are installed."""

import importlib
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)


class Energy:
    """Reads the energy counter of this process's GPU. A failure is logged once."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if torch.cuda.is_available():
            try:
                self._open()
            except ImportError:
                log.info("nvidia-ml-py is not installed, so watts are not reported.")

    def _open(self) -> None:
        pynvml = importlib.import_module("pynvml")
        try:
            pynvml.nvmlInit()
            # By UUID, as CUDA_VISIBLE_DEVICES changes indices.
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except pynvml.NVMLError as error:
            log.info("NVML: %s, so watts are not reported.", error)
            return
        self._nvml = pynvml

    def joules(self) -> float | None:
        """Joules consumed since the driver was loaded; None if they cannot be read."""
        if self._nvml is None:
            return None
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000
        except self._nvml.NVMLError as error:
            log.info("NVML: %s, so watts are no longer reported.", error)
            self._nvml = None
            return None
