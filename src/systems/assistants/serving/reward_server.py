"""Serve scores of a trained model over HTTP, for machines without Triton:
rewards of a reward model, or log-probabilities of a decoder.

python -m src.systems.assistants.serving.reward_server RUN --port 8010
TRITON_HOST_RM='http://127.0.0.1:8010/RUN?token=...' python trainval.py -e ...      # the printed address

RUN is the save directory of a finished run, or a prefix of its id. The protocol is KServe v2 with tensors as JSON, like
Triton's: GET /v2/health/ready, /v2/models/NAME and /v2/models/NAME/config, POST /v2/models/NAME/infer and
/v2/repository/index. Each request is a separate batch, so other requests do not change its padding or rounding.
"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, FailFast, Field, model_validator

from src.errors import ConfigError
from src.experiments.config import Places
from src.models.load import add_options
from src.serving.served_model import ServedModel, find_run, load_served
from src.support.command_line import make_parser, parse_arguments, run_command
from src.support.served_page import add_address
from src.systems.assistants.rewards.kserve import FINGERPRINT, INPUTS

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 26
_Size = Annotated[int, Field(ge=1, lt=1 << 31)]
_Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


class InputTensor(BaseModel):
    """Token ids or an attention mask, in row-major order."""

    name: Literal["input_ids", "attention_mask"]
    shape: Annotated[list[_Size], Field(min_length=2, max_length=2)]
    datatype: Literal["INT32", "INT64"] = "INT32"
    data: Annotated[list[_Int32], FailFast()]

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if len(self.data) != math.prod(self.shape):
            raise ValueError(f"{self.name} has {len(self.data)} numbers for the shape {self.shape}")
        return self


class OutputName(BaseModel):
    """A requested output."""

    name: str


class InferRequest(BaseModel):
    """The body of an inference request."""

    inputs: Annotated[list[InputTensor], Field(min_length=2, max_length=2)]
    outputs: Annotated[list[OutputName], Field(max_length=1)] = []

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if sorted(tensor.name for tensor in self.inputs) != sorted(INPUTS):
            names = ", ".join(tensor.name for tensor in self.inputs)
            raise ValueError(f"inputs: expected each of {', '.join(INPUTS)} once, got {names}")
        return self


def make_server(model: ServedModel, name: str, options: argparse.Namespace) -> Any:
    """The server of one model. options: of `src.support.served_page.add_address`.

    Raises:
        ConfigError: the address or the port is not free.
    """
    from src.serving.http import Batcher, Endpoint, HTTPException, Server

    batcher = Batcher[InferRequest, dict[str, Any]](
        lambda batch: [_infer(model, request) for request in batch], max_batch=1
    )

    def check_name(requested: str) -> None:
        if requested != name:
            raise HTTPException(404, f"/v2/models/{requested}: no such model. The model here is {name}.")

    async def live() -> dict[str, Any]:
        return {}

    async def index() -> list[dict[str, str]]:
        return [{"name": name, "version": "1", "state": "READY"}]

    async def metadata(model_name: str) -> dict[str, Any]:
        check_name(model_name)
        inputs = [{"name": each, "datatype": "INT32", "shape": [-1, -1]} for each in INPUTS]
        return {
            "name": name,
            "versions": ["1"],
            "platform": "trainval",
            "inputs": inputs,
            "outputs": [_describe(model)],
        }

    async def config(model_name: str) -> dict[str, Any]:
        check_name(model_name)
        return {"name": name, "parameters": {FINGERPRINT: {"string_value": model.fingerprint}}}

    async def infer(request: InferRequest, model_name: str) -> dict[str, Any]:
        check_name(model_name)
        return {"model_name": name, "model_version": "1", "outputs": [await batcher.submit(request)]}

    place = "/v2/models/{model_name}"
    endpoints = [
        Endpoint("GET", "/v2/health/live", live),
        Endpoint("GET", "/v2/health/ready", live),
        Endpoint("POST", "/v2/repository/index", index),
        Endpoint("GET", place, metadata),
        Endpoint("GET", f"{place}/ready", metadata),
        Endpoint("GET", f"{place}/config", config),
        Endpoint("POST", f"{place}/infer", infer, InferRequest),
    ]
    return Server(endpoints, MAX_BYTES, options, batcher)


def _describe(model: ServedModel) -> dict[str, Any]:
    return {"name": model.output, "datatype": "FP32", "shape": [-1] if model.output == "rewards" else [-1, -1]}


def _infer(model: ServedModel, request: InferRequest) -> dict[str, Any]:
    import torch

    for output in request.outputs:
        if output.name != model.output:
            raise ConfigError(f"outputs: got {output.name!r}; this model only has {model.output!r}.")
    tensors = {tensor.name: torch.tensor(tensor.data).reshape(tensor.shape) for tensor in request.inputs}
    scores = model.score(**tensors)
    if not scores.isfinite().all():
        raise ConfigError(
            f"{model.output}: some are not finite. The model's weights are damaged, or its training diverged."
        )
    return {**_describe(model), "shape": list(scores.shape), "data": scores.flatten().tolist()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.systems.assistants.serving.reward_server", __doc__)
    parser.add_argument("run", type=Path, help="a save directory, or a prefix of its id")
    add_address(parser, 8010, "anyone with the token can request scores")
    add_options(parser)
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    run, places = find_run(args.run, Places(args.data_path, args.savedir_base))
    model = load_served(run, places, args.device)
    server = make_server(model, run.name, args)
    log.info("Serving %s of %s. Press Ctrl-C to stop.", model.output, run.name)
    server.run(f"/{run.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
