"""A trained model for Triton's Python backend. `1/model.py` of a repository imports it in the server's Python."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from src.errors import CheckpointError, UserError
from src.experiments.config import Places
from src.serving.served_model import load_served
from src.systems.assistants.rewards.kserve import FINGERPRINT, INPUTS


class Model:
    """One instance of the model. Triton defines the names of the methods."""

    run: str
    """Save directory of the run."""
    data: str
    """Folder of prepared data."""
    mode: str

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights.

        Raises:
            CheckpointError: the run's weights have changed since the repository was written.
            UserError: a part of the model is missing.
        """
        run, expected_fingerprint = (
            Path(self.run),
            json.loads(args["model_config"])["parameters"][FINGERPRINT]["string_value"],
        )
        device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        self._triton: Any = import_module("triton_python_backend_utils")
        self._model = load_served(run, Places(Path(self.data), run.parent), device, self.mode)
        if self._model.fingerprint != expected_fingerprint:
            raise CheckpointError(
                f"{run}: the weights have changed since this repository was written. "
                "Write it again with python -m src.systems.assistants.serving.triton.repository."
            )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests. Each is a separate batch, so other requests do not change its padding or rounding."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        import torch

        codes, make_response = self._triton.TritonError, self._triton.InferenceResponse
        try:
            inputs = [self._triton.get_input_tensor_by_name(request, name).as_numpy() for name in INPUTS]
            scores = self._model.score(*(torch.tensor(values) for values in inputs)).numpy()
        except UserError as error:
            return make_response(error=codes(str(error), codes.INVALID_ARG))
        except Exception as error:  # noqa: BLE001  the server must continue
            return make_response(error=codes(f"{type(error).__name__}: {error}", codes.INTERNAL))
        values = scores[:, None] if scores.ndim == 1 else scores
        return self._triton.InferenceResponse(output_tensors=[self._triton.Tensor(self._model.output, values)])
