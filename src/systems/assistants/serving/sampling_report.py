"""Sample answers to prompts with several configurations:
`python -m src.systems.assistants.serving.sampling_report MODEL --prompts FILE --report FILE`.

MODEL is a run that was trained on conversations (its save directory or a prefix of its id), a checkpoint, an export, a
folder of save_pretrained, or an id on the hub. Each line of --prompts is JSON: a text, an object with "prompt", or, as
in prepared folders, an object with "messages", in which the first user message is the prompt. --config is a YAML file
of named sampling configurations (resources/sampling.yaml) with generate_args, pre_text (a prefix of each prompt) and
system_profile (the system message).

Greedy configurations generate one answer, sampling configurations --num_samples answers. Samples depend only on --seed,
the configuration and the number of the prompt. The report is JSON: {"model_name", "date", "args", "prompts":
[{"prompt", "results": [{"sampling_config", "sampling_params", "outputs": [...]}]}]}
"""

import argparse
import datetime
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from src.data.jsonl import check_text
from src.errors import ConfigError, DataError
from src.experiments import config
from src.experiments.config import Places, unknown_text
from src.files import ROOT, read_yaml, reading, write_json
from src.models.load import add_options, move
from src.serving.pretrained import SOURCE, load_writer
from src.support.command_line import make_parser, parse_arguments, run_command
from src.support.parsing import parse_json
from src.systems.assistants.conversations.entries import Message
from src.systems.assistants.serving.conversation import Talk

_SAMPLING_ARGUMENTS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Arguments of `generate` that have no effect without sampling."""


class Sampling(config.Config):
    """A sampling configuration."""

    name: str = Field(min_length=1)
    generate_args: dict[str, Any] = {}
    """Arguments for transformers' `generate`."""
    pre_text: str = ""
    system_profile: str | None = None

    @field_validator("generate_args")
    @classmethod
    def _check_names(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        from transformers import GenerationConfig

        names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
        for name in arguments:
            if name not in names:
                raise ValueError(unknown_text("argument of generate", name, names, "transformers.GenerationConfig"))
        if type(arguments.get("max_new_tokens")) is not int or arguments["max_new_tokens"] < 1:
            raise ValueError(f"max_new_tokens: expected an int above 0, got {arguments.get('max_new_tokens')!r}.")
        return arguments

    def messages(self, prompt: str) -> list[Message]:
        """The messages before the answer to a prompt."""
        system = [Message("system", self.system_profile)] if self.system_profile else []
        return [*system, Message("user", self.pre_text + prompt)]


def read_samplings(path: Path, names: Sequence[str] | None) -> list[Sampling]:
    """Read the configurations of a file and merge them with its default.
    Without do_sample the default's sampling arguments are dropped.

    names: the configurations to read; None for all.

    Raises:
        ConfigError: the file is invalid, or a name is unknown.
    """
    raw = read_yaml(path, "default and configurations")
    default, entries = raw.get("default", {}), raw.get("configurations")
    if raw.keys() - {"default", "configurations"} or not isinstance(default, dict) or not isinstance(entries, list):
        raise ConfigError(
            f"{path}: expected default, an object, and configurations, a list of objects; got the keys "
            f"{', '.join(map(str, raw))}."
        )
    samplings: dict[str, Sampling] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: configurations[{number}]"
        if not isinstance(entry, dict) or not isinstance(arguments := entry.get("generate_args", {}), dict):
            raise ConfigError(
                f"{where}: expected an object with name and generate_args, an object; got {str(entry)[:60]}."
            )
        merged = {**default.get("generate_args", {}), **arguments}
        if not merged.get("do_sample"):
            ignored = [name for name in _SAMPLING_ARGUMENTS if arguments.get(name) is not None]
            if ignored:
                raise ConfigError(f"{where}: {ignored[0]}: would be ignored without do_sample. Remove it.")
            merged = {name: value for name, value in merged.items() if name not in _SAMPLING_ARGUMENTS}
        sampling = config.load(Sampling, {**default, **entry, "generate_args": merged}, where)
        if samplings.setdefault(sampling.name, sampling) is not sampling:
            raise ConfigError(f"{where}: duplicate name {sampling.name!r}. Rename one.")
    for name in names or ():
        if name not in samplings:
            raise ConfigError(f"--only: {unknown_text('configuration', name, samplings)}")
    return [sampling for name, sampling in samplings.items() if names is None or name in names]


def read_prompts(path: Path) -> list[str]:
    """The prompt of each line.

    Raises:
        DataError: the file is missing or empty, or a line has no prompt; reports FILE:LINE.
    """
    try:
        with reading(path, DataError):
            lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    if not lines:
        raise DataError(f"{path}: empty. Expected one prompt per line.")
    return [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _prompt(line: bytes, where: str) -> str:
    value = parse_json(line, where, DataError)
    if isinstance(value, dict):
        messages = value.get("messages")
        user_messages = [
            each
            for each in (messages if isinstance(messages, list) else ())
            if isinstance(each, dict) and each.get("role") == "user"
        ]
        value = user_messages[0].get("content") if user_messages else value.get("prompt")
    if not isinstance(value, str) or not value:
        raise DataError(
            f'{where}: expected a text, or an object with "prompt" or "messages"; got '
            f"{line[:60].decode(errors='replace')}."
        )
    check_text(value, where)
    return value


def sample(
    talk: Talk, samplings: Sequence[Sampling], prompts: Sequence[str], count: int, seed: int
) -> list[Mapping[str, Any]]:
    """Generate the "prompts" of a report. count: number of samples per prompt.

    Raises:
        ConfigError: a prompt is too long, or transformers rejects a configuration.
    """
    import torch

    prompt_results = []
    for number, prompt in enumerate(prompts):
        results = []
        for way in samplings:
            torch.manual_seed(
                int.from_bytes(hashlib.sha256(f"{seed}/{way.name}/{number}".encode()).digest()[:8], "big")
            )
            number_of_outputs = count if way.generate_args.get("do_sample") else 1
            try:
                ids = talk.prompt_ids(way.messages(prompt))
                outputs = talk.generate(ids, num_return_sequences=number_of_outputs, **way.generate_args)
            except (ValueError, TypeError, ConfigError) as error:
                raise ConfigError(
                    f"prompt {number + 1}, configuration {way.name!r}: {' '.join(str(error).split())[:300]}"
                ) from None
            results.append({"sampling_config": way.name, "sampling_params": way.generate_args, "outputs": outputs})
        prompt_results.append({"prompt": prompt, "results": results})
    return prompt_results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.systems.assistants.serving.sampling_report", __doc__)
    add = parser.add_argument
    add("run", metavar="MODEL", type=Path, help=SOURCE)
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines")
    add("--report", type=Path, required=True, metavar="FILE", help="JSON to write")
    add(
        "--config",
        type=Path,
        default=ROOT / "resources" / "sampling.yaml",
        metavar="FILE",
        help="(default: resources/sampling.yaml)",
    )
    add("--only", nargs="+", metavar="NAME", help="configurations to use (default: all)")
    add("--num_samples", type=int, default=2, metavar="N", help="(default: %(default)s)")
    add("--seed", type=int, default=42, help="(default: %(default)s)")
    add_options(parser)
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    if args.num_samples < 1:
        raise ConfigError(f"--num_samples: expected at least 1, got {args.num_samples}.")
    samplings, prompts = read_samplings(args.config, args.only), read_prompts(args.prompts)
    talk, model = load_writer(args.run, Places(args.data_path, args.savedir_base))
    if not isinstance(talk, Talk):
        raise ConfigError(f"{args.run}: the model has no chat template. Use a model that was trained on conversations.")
    move(model, args.device)
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report = {
        "model_name": args.run.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "args": arguments,
        "prompts": sample(talk, samplings, prompts, args.num_samples, args.seed),
    }
    write_json(args.report, report)
    sys.stdout.write(f"{args.report}: {len(prompts)} prompts, {len(samplings)} configurations\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
