"""Which optimizer, learning rate and weight decay each trained parameter has: `loop.groups`, `loop.layerwise_decay`,
and the split between Muon and AdamW."""

from dataclasses import dataclass

from torch import nn

from src.errors import ConfigError
from src.support.patterns import compile_pattern
from src.training.config import LoopConfig, ParameterGroup
from src.training.parallel.compilation import layers


@dataclass(frozen=True)
class Settings:
    """Settings that the parameters of a group share."""

    label: str
    """Name of the group in score columns; "" if nothing differs from the loop."""
    optimizer: str
    rate_factor: float
    """Learning rate as a share of the loop's, equal in every step."""
    weight_decay: float
    of_matrices: bool
    """Whether the parameters have two dimensions or more. Only those can have weight decay."""


def split(model: nn.Module, config: LoopConfig) -> dict[Settings, dict[str, nn.Parameter]]:
    """Split the trained parameters, by name, into groups of equal settings, those of matrices first.

    Raises:
        ConfigError: a pattern matches nothing, Muon has nothing to train, or the model has no layers for the decay of
            learning rates. On every rank.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    places, hidden = layer_numbers(model), hidden_matrices(model)
    patterns = [compile_pattern(group.match) for group in config.groups]
    matches = {name: [i for i, each in enumerate(patterns) if each.search(name)] for name in parameters}
    has_layers = any(label.startswith("layer") for label, _ in places.values())
    _check(config, matches, hidden, has_layers)
    groups: dict[Settings, dict[str, nn.Parameter]] = {}
    for name, parameter in sorted(parameters.items(), key=lambda item: item[1].ndim < 2):
        number = matches[name][0] if matches[name] else None
        settings = _settings(config, number, name in hidden, places.get(name), parameter.ndim >= 2)
        groups.setdefault(settings, {})[name] = parameter
    return groups


def _settings(
    config: LoopConfig, number: int | None, is_hidden: bool, place: tuple[str, int] | None, is_matrix: bool
) -> Settings:
    """number: index in `loop.groups`. place: from `layer_numbers`."""
    group = ParameterGroup.model_construct(match="") if number is None else config.groups[number]
    optimizer, rate = group.optimizer or config.optimizer, config.learning_rate
    parts = [] if number is None else [f"group{number}"]
    if optimizer == "muon" and is_hidden:
        rate = config.muon_learning_rate or rate
        parts.append("muon")
    elif optimizer == "muon":
        optimizer = "adamw"
    decay = config.weight_decay if group.weight_decay is None else group.weight_decay
    factor = (group.learning_rate or rate) / config.learning_rate
    if config.layerwise_decay < 1 and place:
        parts.append(place[0])
        factor *= config.layerwise_decay ** place[1]
    return Settings("_".join(parts), optimizer, factor, decay if is_matrix else 0.0, is_matrix)


def _check(config: LoopConfig, matches: dict[str, list[int]], hidden: set[str], has_layers: bool) -> None:
    problems = []
    for number, group in enumerate(config.groups):
        where = f"loop.groups[{number}]"
        names = [name for name, numbers in matches.items() if numbers[:1] == [number]]
        if not names:
            earlier = any(number in numbers for numbers in matches.values())
            reason = "matches only parameters of earlier groups" if earlier else "matches no trained parameter"
            examples = ", ".join(list(matches)[:: max(1, len(matches) // 4)])
            problems.append(f"{where}.match: {group.match!r} {reason}. Change or remove it. Some names: {examples}.")
        elif group.optimizer == "muon" and hidden.isdisjoint(names):
            problems.append(f"{where}.optimizer: 'muon' trains matrices of layers, and {group.match!r} matches none.")
    if config.optimizer == "muon" and hidden.isdisjoint(matches):
        problems.append("loop.optimizer: 'muon' trains matrices of layers, and the model trains none. Use 'adamw'.")
    if config.layerwise_decay < 1 and not has_layers:
        problems.append("loop.layerwise_decay: the model has no list of layers. Remove it.")
    if problems:
        error = ConfigError("\n".join(problems))
        error.everywhere = True  # the model is the same on every rank
        raise error


def layer_numbers(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Names of the parameters before the last layer's end -> label, such as "layer3", and number of factors of
    `loop.layerwise_decay`.

    Layers count in the order of the model, those of an encoder before those of its decoder. Parameters between two
    layers belong to the layer before them. Embeddings outside layers are innermost, also if tied to the head.
    """
    numbers = {id(part): i for i, layer in enumerate(layers(model)) for part in layer.parameters()}
    count, current = len(layers(model)), -1
    embeddings = _embedding_ids(model)
    places: dict[str, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in numbers:
            current = numbers[id(parameter)]
        elif current == count - 1 and id(parameter) not in embeddings:
            continue
        is_inner = current < 0 or (id(parameter) in embeddings and id(parameter) not in numbers)
        places[name] = ("embeddings", count + 1) if is_inner else (f"layer{current}", count - current)
    return places


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the matrices of the model's layers, which Muon can train: no embeddings, heads, vectors or stacks of
    matrices."""
    inside = {id(parameter) for layer in layers(model) for parameter in layer.parameters()}
    inside -= _embedding_ids(model)
    return {name for name, part in model.named_parameters() if part.ndim == 2 and id(part) in inside}


def _embedding_ids(model: nn.Module) -> set[int]:
    return {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
