"""Run a Triton server on a model repository in this terminal. Press Ctrl-C to stop it.

make triton                                                      installs the server in .triton, once
python -m src.systems.assistants.serving.triton.server FOLDER    serves the models in FOLDER and prints their addresses

src.systems.assistants.serving.triton.repository writes models to FOLDER.
"""

import hashlib
import logging
import os
import socket
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from src.errors import ConfigError, RunError
from src.models.load import ROOT
from src.support.command_line import make_parser, parse_arguments, run_command
from src.systems.assistants.serving.triton.repository import list_models

log = logging.getLogger(__name__)

ENVIRONMENT = ROOT / ".triton"
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def command(folder: Path, address: str, ports: dict[str, int]) -> list[str]:
    """The server's command line. Frees the shared memory of a killed server on the same folder.

    Raises:
        ConfigError: a port is in use, or the server or a backend is not installed.
        RunError: the folder is not a repository of this project, or has no models.
    """
    models = list_models(folder)
    if not models:
        raise RunError(
            f"{folder}: no models. "
            f"Write one with python -m src.systems.assistants.serving.triton.repository RUN {folder} --mode rm"
        )
    program = _find_program()
    for name, facts in models.items():
        if not (ENVIRONMENT / "backends" / facts["backend"]).is_dir():
            raise ConfigError(
                f"{folder / name}: needs the backend {facts['backend']!r}, missing from the server in {ENVIRONMENT}. "
                "Use NVIDIA's Triton for this folder, or write the model with --backend python."
            )
    for name, port in ports.items():
        _check_port(address, name, port)
    memory = f"trainval_triton_{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}_"
    for path in Path("/dev/shm").glob(f"{memory}*"):
        path.unlink(missing_ok=True)
    return [
        str(program),
        f"--model-repository={folder.resolve()}",
        f"--backend-directory={ENVIRONMENT / 'backends'}",
        "--model-control-mode=explicit",
        "--exit-timeout-secs=10",
        "--disable-auto-complete-config",
        *(f"--{name}-address={address}" for name in ports),
        *(f"--{name}-port={port}" for name, port in ports.items()),
        *(f"--load-model={name}" for name in models),
        f"--backend-config=python,shm-region-prefix-name={memory}",
    ]


def environment() -> dict[str, str]:
    """The server's environment. The Python backend uses the first python3 on PATH and the linker's libpython."""
    libraries = [sysconfig.get_config_var("LIBDIR"), str(_find_program().parents[3] / "nvidia_pytriton.libs")]
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PATH": f"{ENVIRONMENT / 'venv' / 'bin'}:{os.environ.get('PATH', '')}",
        "LD_LIBRARY_PATH": ":".join([*libraries, *([before] if before else [])]),
        "HF_HUB_OFFLINE": "1",
    }


def _find_program() -> Path:
    """The server's program.

    Raises:
        ConfigError: it is not installed.
    """
    binaries = sorted(ENVIRONMENT.glob("venv/lib/python3*/site-packages/pytriton/tritonserver/bin/tritonserver"))
    if not (ENVIRONMENT / "installed").is_file() or not binaries:
        raise ConfigError(f"{ENVIRONMENT}: the Triton server is not installed. Run: make triton")
    return binaries[0]


def _check_port(address: str, name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--{name}_port {port}: cannot listen on {address}: {reason}. Use another port."
            ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. The server replaces this process."""
    parser = make_parser("src.systems.assistants.serving.triton.server", __doc__)
    parser.add_argument("folder", type=Path, help="the model repository")
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="address to listen on; anyone with access to it can unload models (default: %(default)s)",
    )
    for name, port in PORTS.items():
        parser.add_argument(f"--{name}_port", type=int, default=port, help="default: %(default)s")
    args = parse_arguments(parser, argv)

    def run() -> int:
        ports = {name: getattr(args, f"{name}_port") for name in PORTS}
        words = command(args.folder, args.address, ports)
        for name in list_models(args.folder):
            log.info("%s:%d/%s", args.address, ports["grpc"], name)
            log.info("http://%s:%d/%s", args.address, ports["http"], name)
        os.execve(words[0], words, environment())

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
