"""Samples answers to prompts in several ways: `python -m src.serving.sampling_report RUN --prompts FILE --report FILE`.

RUN is a save directory that was trained on conversations, the beginning of its id, or a checkpoint. Each line of --prompts is a text of
JSON, or an object with "prompt" or, as in prepared folders, "messages", of which the first that a user says is asked. --config is a YAML
file of named sampling configurations (resources/sampling.yaml): generate_args; pre_text, which is put before each prompt; and
system_profile, which the system says first.

A configuration that does not sample answers once, the others --num_samples times. What is drawn depends on --seed, the configuration and
the number of the prompt alone. The report is JSON:
{"model_name", "date", "args", "prompts": [{"prompt", "results": [{"sampling_config", "sampling_params", "outputs": [...]}]}]}
"""

import argparse
import datetime
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from src import config as configs
from src.command_line import make_parser, parse_arguments, run_command
from src.config import Places, unknown_text
from src.data.conversations.entries import Message
from src.data.jsonl import check_text
from src.errors import ConfigError, DataError
from src.files import read_yaml, reading, write_json
from src.models.load import ROOT, add_options, move
from src.serving.conversation import Talk
from src.serving.pretrained import SOURCE, load_writer

_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Arguments of `generate` that change nothing where no token is drawn."""


class Sampling(configs.Config):
    """One way to sample."""

    name: str = Field(min_length=1)
    generate_args: dict[str, Any] = {}
    """Of transformers' `generate`."""
    pre_text: str = ""
    system_profile: str | None = None

    @field_validator("generate_args")
    @classmethod
    def _are_known(cls, given: dict[str, Any]) -> dict[str, Any]:
        from transformers import GenerationConfig

        known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
        for name in given:
            if name not in known:
                raise ValueError(unknown_text("argument of generate", name, known))
        if type(given.get("max_new_tokens")) is not int or given["max_new_tokens"] < 1:
            raise ValueError(f"max_new_tokens: expected an int above 0, got {given.get('max_new_tokens')!r}.")
        return given

    def messages(self, prompt: str) -> list[Message]:
        """What is said before the answer to a prompt."""
        system = [Message("system", self.system_profile)] if self.system_profile else []
        return [*system, Message("user", self.pre_text + prompt)]


def read_samplings(path: Path, names: Sequence[str] | None) -> list[Sampling]:
    """Those in a file, merged with its default, whose values any other overrides; without do_sample its arguments of sampling do not count.

    names: of those to take; None: all.

    Raises:
        ConfigError: the file, or a name, is wrong.
    """
    raw = read_yaml(path, "default and configurations")
    default, given = raw.get("default", {}), raw.get("configurations")
    if raw.keys() - {"default", "configurations"} or not isinstance(default, dict) or not isinstance(given, list):
        raise ConfigError(f"{path}: expected default, an object, and configurations, a list of objects; it has {', '.join(map(str, raw))}.")
    found: dict[str, Sampling] = {}
    for number, own in enumerate(given):
        where = f"{path}: configurations[{number}]"
        if not isinstance(own, dict) or not isinstance(arguments := own.get("generate_args", {}), dict):
            raise ConfigError(f"{where}: expected an object with name and generate_args.")
        merged = {**default.get("generate_args", {}), **arguments}
        if not merged.get("do_sample"):
            ignored = [name for name in _OF_SAMPLING if arguments.get(name) is not None]
            if ignored:
                raise ConfigError(f"{where}: {ignored[0]}: would be ignored without do_sample. Leave it out.")
            merged = {name: value for name, value in merged.items() if name not in _OF_SAMPLING}
        made = configs.load(Sampling, {**default, **own, "generate_args": merged}, where)
        if found.setdefault(made.name, made) is not made:
            raise ConfigError(f"{where}: the name {made.name!r} stands twice.")
    for name in names or ():
        if name not in found:
            raise ConfigError(f"--only: {unknown_text('configuration', name, found)}")
    return [made for name, made in found.items() if names is None or name in names]


def read_prompts(path: Path) -> list[str]:
    """One of each line.

    Raises:
        DataError: the file is missing or empty, or a line has no prompt; names the line.
    """
    try:
        with reading(path, DataError):
            lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    if not lines:
        raise DataError(f"{path}: empty. It should have a prompt on each line.")
    return [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _prompt(line: bytes, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}.") from None
    if isinstance(value, dict):
        given = value.get("messages")
        said = [each for each in (given if isinstance(given, list) else ()) if isinstance(each, dict) and each.get("role") == "user"]
        value = said[0].get("content") if said else value.get("prompt")
    if not isinstance(value, str) or not value:
        raise DataError(f'{where}: expected a text, or an object with "prompt" or "messages"; got {line[:60].decode(errors="replace")}.')
    check_text(value, where)
    return value


def sample(talk: Talk, samplings: Sequence[Sampling], prompts: Sequence[str], count: int, seed: int) -> list[Mapping[str, Any]]:
    """The "prompts" of a report. count: samples of each prompt.

    Raises:
        ConfigError: a prompt is too long, or transformers refuses a configuration.
    """
    import torch

    found = []
    for number, prompt in enumerate(prompts):
        results = []
        for way in samplings:
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{way.name}/{number}".encode()).digest()[:8], "big"))
            number_of_outputs = count if way.generate_args.get("do_sample") else 1
            try:
                ids = talk.prompt_ids(way.messages(prompt))
                outputs = talk.generate(ids, num_return_sequences=number_of_outputs, **way.generate_args)
            except (ValueError, TypeError, ConfigError) as error:
                raise ConfigError(f"prompt {number + 1}, configuration {way.name!r}: {' '.join(str(error).split())[:300]}") from None
            results.append({"sampling_config": way.name, "sampling_params": way.generate_args, "outputs": outputs})
        found.append({"prompt": prompt, "results": results})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.serving.sampling_report", __doc__)
    add = parser.add_argument
    add("run", metavar="MODEL", type=Path, help=SOURCE)
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines")
    add("--report", type=Path, required=True, metavar="FILE", help="JSON to write")
    add("--config", type=Path, default=ROOT / "resources" / "sampling.yaml", metavar="FILE", help="(default: resources/sampling.yaml)")
    add("--only", nargs="+", metavar="NAME", help="configurations to take (default: all)")
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
        raise ConfigError(f"{args.run}: its model has no chat template. Name a model that was trained on conversations.")
    move(model, args.device)
    told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report = {
        "model_name": args.run.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "args": told,
        "prompts": sample(talk, samplings, prompts, args.num_samples, args.seed),
    }
    write_json(args.report, report)
    sys.stdout.write(f"{args.report}: {len(prompts)} prompts, {len(samplings)} configurations\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
