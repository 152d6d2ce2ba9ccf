"""A tokenizer with sentinels: `python -m data_prep.t5.t5_tokenizer --from stdlib_tokenizer --name stdlib_t5_tokenizer`.

Give either --from, an existing tokenizer; or --spiece, the SentencePiece model of T5; or --train, text for training a
new one like T5's: SentencePiece's unigrams (Kudo 2018, arXiv 1804.10959) after <pad> 0, </s> 1 and <unk> 2, or with
--model bpe byte-level BPE, which preserves line ends and spaces, as code needs. Writes a folder below --data_path: the
tokenizer with <extra_id_99> to <extra_id_0> after all other tokens, so that <extra_id_0> has the highest id (Raffel
et al. 2020, arXiv 1910.10683; T5's own has 32,000 pieces and 100 sentinels), with a padding token of its own and an end
token. No text becomes a sentinel, an end or padding through SafeTokenizer of src.data.text. With --sentences
N, <eosen> and <sent_0> to <sent_N-1>, which data set depth needs, follow the sentinels, so that the ids of a trained
model do not change.
"""

import argparse
import hashlib
import importlib.metadata
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import command, training_text
from data_prep.crossattn import stdlib_qa
from src import files
from src.data.text import tokenizers
from src.errors import DataError
from src.support.command_line import require_at_least
from src.systems.t5.denoising.depth import dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COMMAND = "python -m data_prep.t5.t5_tokenizer"
NUM_SENTINELS = 100
PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
DEFAULTS = {"model": "unigram", "vocab_size": 32_000, "text_field": "text"}
"""Default options of --train."""
_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # types of pieces, sentencepiece_model.proto
_UNIGRAM = 1


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--name", required=True, help="the new folder below it")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--from", dest="source", metavar="TOKENIZER", help="a folder below --data_path, any other folder, or a hub id"
    )
    source.add_argument(
        "--spiece", type=Path, metavar="FILE", help="a SentencePiece model of unigrams, as T5's spiece.model"
    )
    source.add_argument(
        "--train", nargs="+", metavar="SOURCE", help="text: files, saved folders or hub:ID, as for data_prep.tokenize"
    )
    add("--model", choices=("unigram", "bpe"), help=f"what --train makes (default: {DEFAULTS['model']})")
    add(
        "--vocab_size",
        type=int,
        metavar="N",
        help=f"its tokens before the sentinels (default: {DEFAULTS['vocab_size']})",
    )
    add("--text_field", help="of --train's JSON objects and table rows: which one is the text (default: text)")
    add(
        "--sentinels",
        type=int,
        default=NUM_SENTINELS,
        metavar="N",
        help="UL2 on 512 tokens needs 128 (default: %(default)s)",
    )
    add(
        "--sentences",
        type=int,
        default=0,
        metavar="N",
        help="also N sentence tokens; --from can then have sentinels already",
    )


def _run(train: Sequence[str] | None, source: str | None, spiece: Path | None, **options: Any) -> bool:
    require_at_least(0, sentences=options["sentences"])
    require_at_least(1, sentinels=options["sentinels"])
    about = {name: value for name in DEFAULTS if (value := options.pop(name)) is not None}
    if train:
        return prepare_trained(train=train, options={**DEFAULTS, **about}, **options)
    if about:
        raise DataError(
            f"--{next(iter(about))}: only for --train, as --from and --spiece already have tokens. Remove it."
        )
    return prepare(source=source, spiece=spiece, **options)


def prepare(
    data_path: Path,
    name: str,
    source: str | None = None,
    spiece: Path | None = None,
    sentences: int = 0,
    sentinels: int = NUM_SENTINELS,
) -> bool:
    """Make the folder `data_path / name` from one of two sources; False if it is complete and has the same provenance.

    Raises:
        DataError: the source is missing or damaged, or already has the new tokens. With `sentences`, it can have
            sentinels.
        RunError: the disk refuses.
    """
    folder = data_path / name
    if spiece is not None:
        with_sentinels = from_sentencepiece(spiece, sentinels)
    else:
        assert source is not None, "one of the two is given"
        place = data_path / source
        if place.resolve() == folder.resolve():
            raise DataError(f"--name: {folder} is also the source (--from). Choose another name.")
        with_sentinels = tokenizers.load(place if place.is_dir() else source)
        if not (sentences and _sentinels_in(with_sentinels.get_vocab())):
            with_sentinels = add_sentinels(with_sentinels, source, sentinels)
    if sentences:
        add_sentences(with_sentinels, sentences, source or str(spiece))
    text = with_sentinels.backend_tokenizer.to_str()
    made_from = {
        "tokenizer_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "eos_token": with_sentinels.eos_token,
        "pad_token": with_sentinels.pad_token,
        "packages": _versions("tokenizers", "transformers"),
    }
    return (
        command.make_folder(folder, COMMAND, made_from, lambda partial_folder: _save(with_sentinels, partial_folder))
        is not None
    )


def prepare_trained(
    data_path: Path,
    name: str,
    train: Sequence[str],
    options: dict[str, Any],
    sentences: int = 0,
    sentinels: int = NUM_SENTINELS,
) -> bool:
    """Make the folder `data_path / name` from text; False if it is complete and has the same provenance.
    options: see `DEFAULTS`.

    Raises:
        DataError: a source is missing or damaged, or has too little text for the vocabulary size.
        RunError: the disk refuses.
    """
    unigram, vocab_size = options["model"] == "unigram", options["vocab_size"]
    require_at_least(4 if unigram else 259, vocab_size=vocab_size)
    corpus = training_text.open_corpus(train, options["text_field"])
    made_from = {
        **corpus.facts,
        "options": {**options, "sentinels": sentinels, "sentences": sentences},
        "packages": _versions("tokenizers", "transformers", *(["sentencepiece"] if unigram else [])),
        "scripts_sha256": command.digest_files([__file__, stdlib_qa.__file__, training_text.__file__]),
    }

    def fill(partial_folder: Path) -> dict[str, Any]:
        tokenizer = (train_unigram if unigram else train_bpe)(corpus.batches(name), vocab_size, sentinels)
        if sentences:
            add_sentences(tokenizer, sentences, "--train")
        return _save(tokenizer, partial_folder)

    return command.make_folder(data_path / name, COMMAND, made_from, fill) is not None


def _save(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> dict[str, Any]:
    tokenizer.save_pretrained(folder)
    return {"tokens": len(tokenizer)}


def _versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def train_unigram(
    batches: Iterator[list[str]], vocab_size: int, sentinels: int = NUM_SENTINELS
) -> "PreTrainedTokenizerFast":
    """Train a SentencePiece model of `vocab_size` pieces on lines of text; add sentinels.

    The trainer of `tokenizers` is not deterministic; SentencePiece's is for a fixed number of threads.

    Raises:
        DataError: the text is too small for `vocab_size` pieces, or has more distinct characters.
    """
    import sentencepiece

    lines = training_text.sample_lines(text for texts in batches for text in texts)
    if not lines:
        raise DataError("--train: the sources contain no text. Add sources with text.")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "model")
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_prefix=str(place),
                vocab_size=vocab_size,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                character_coverage=0.99999,  # as in mT5 (Xue et al. 2021, arXiv 2010.11934)
                num_threads=16,
                minloglevel=2,
            )
        except (
            RuntimeError
        ) as error:  # "INTERNAL: file(line) [condition] Vocabulary size too high (N). Please set it to a value <= M."
            raise DataError(f"--vocab_size: {str(error).rpartition('] ')[2].partition(' Increase')[0]}") from None
        return from_sentencepiece(place.with_suffix(".model"), sentinels)


def train_bpe(
    batches: Iterator[list[str]], vocab_size: int, sentinels: int = NUM_SENTINELS
) -> "PreTrainedTokenizerFast":
    """Train byte-level BPE of `vocab_size` tokens; add sentinels.

    Raises:
        DataError: the text is too small for `vocab_size` tokens.
    """
    from transformers import PreTrainedTokenizerFast

    backend = stdlib_qa.train_byte_level_bpe((text for texts in batches for text in texts), vocab_size, [PAD, EOS, UNK])
    if backend.get_vocab_size() < vocab_size:
        raise DataError(
            f"--vocab_size: Vocabulary size too high ({vocab_size}). Please set it to a value <= "
            f"{backend.get_vocab_size()}."
        )
    return add_sentinels(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=PAD, unk_token=UNK),
        "--train",
        sentinels,
    )


def add_sentinels(
    tokenizer: "PreTrainedTokenizerFast", where: str, sentinels: int = NUM_SENTINELS
) -> "PreTrainedTokenizerFast":
    """Copy a tokenizer, and add sentinels and, if missing, a padding token.
    The copy appends the end token to texts, as the data sets of T5 do.

    Raises:
        DataError: the tokenizer already has sentinels.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    _refuse_sentinels(tokenizer.get_vocab(), where)
    eos, pad = tokenizer.eos_token, tokenizer.pad_token
    backend = _copy_backend(tokenizer)
    if pad is None or pad == eos:
        pad = PAD
        backend.add_special_tokens([PAD])
    backend.add_special_tokens(_sentinels(sentinels))
    end = processors.TemplateProcessing(
        single=["$A", eos], pair=["$A", eos, "$B", eos], special_tokens=[(eos, backend.token_to_id(eos))]
    )
    before = backend.post_processor
    if not tokenizer("")["input_ids"]:  # else it already adds special tokens
        backend.post_processor = end if before is None else processors.Sequence([before, end])
    others = [
        token
        for token in tokenizer.all_special_tokens
        if token not in (eos, pad, tokenizer.bos_token, tokenizer.unk_token)
    ]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        pad_token=pad,
        bos_token=tokenizer.bos_token,
        unk_token=tokenizer.unk_token,
        additional_special_tokens=[*others, *_sentinels(sentinels)],
        clean_up_tokenization_spaces=False,
    )


def add_sentences(tokenizer: "PreTrainedTokenizerFast", number: int, where: str) -> None:
    """Add <eosen> and `number` sentence tokens to `tokenizer`, after all other tokens.

    Raises:
        DataError: the tokenizer already has some of them.
    """
    new_tokens = dataset.sentence_tokens(number)
    if existing_tokens := sorted({*new_tokens} & {*tokenizer.get_vocab()}):
        raise DataError(
            f"{where}: already has the token {existing_tokens[0]!r}. Use it as it is, or choose another tokenizer."
        )
    tokenizer.add_tokens(new_tokens, special_tokens=True)


def _copy_backend(tokenizer: "PreTrainedTokenizerFast") -> Any:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend


def _sentinels(count: int) -> list[str]:
    """Sentinels in order of ID."""
    return [f"<extra_id_{number}>" for number in reversed(range(count))]


def _sentinels_in(vocabulary: Any) -> list[str]:
    return [token for token in vocabulary if re.fullmatch(r"<extra_id_\d+>", token)]


def _refuse_sentinels(vocabulary: Any, where: str) -> None:
    sentinels = _sentinels_in(vocabulary)
    if sentinels:
        raise DataError(
            f"{where}: already has {len(sentinels)} sentinels, such as {min(sentinels)!r}. Use it as it is."
        )


def from_sentencepiece(path: Path, sentinels: int = NUM_SENTINELS) -> "PreTrainedTokenizerFast":
    """Load a unigram model as a fast tokenizer that segments text the same, with sentinels after its pieces.

    The sentinels are not pieces of the model. In T5Tokenizer they are, so text that spells a sentinel becomes one.

    Raises:
        DataError: the file is missing, or is not a unigram model with an end token and without sentinels.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    proto = _read_proto(path)
    names = {kind: [piece.piece for piece in proto.pieces if piece.type == kind] for kind in (_UNKNOWN, _CONTROL)}
    if len(names[_UNKNOWN]) != 1 or "</s>" not in names[_CONTROL]:
        raise DataError(
            f"{path}: expected one unknown piece and the control piece '</s>', "
            f"got {names[_UNKNOWN]} and {names[_CONTROL]}. Use a model of T5, or train one with --train."
        )
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    _refuse_sentinels([name for name, _ in pieces], str(path))
    unknown, controls = names[_UNKNOWN][0], [*names[_CONTROL], *names[_UNKNOWN]]
    backend = Tokenizer(models.Unigram(pieces, unk_id=[name for name, _ in pieces].index(unknown), byte_fallback=False))
    charsmap = proto.normalizer_spec.precompiled_charsmap
    if charsmap:
        backend.normalizer = normalizers.Precompiled(charsmap)
    # `tokenizers` treats control pieces as normal pieces, so split text that spells one after its first character.
    pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in controls)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always", split=True),
            pre_tokenizers.Split(Regex(pattern), behavior="merged_with_previous"),
        ]
    )
    backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always", split=True)
    end = [name for name, _ in pieces].index("</s>")
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", end)]
    )
    backend.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in [*controls, *_sentinels(sentinels)]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        unk_token=unknown,
        pad_token=PAD,
        additional_special_tokens=_sentinels(sentinels),
        clean_up_tokenization_spaces=False,
    )


def _read_proto(path: Path) -> Any:
    from google.protobuf.message import DecodeError
    from transformers.convert_slow_tokenizer import import_protobuf

    schema: Any = import_protobuf()
    proto = schema.ModelProto()
    try:
        with files.reading(path, DataError):
            proto.ParseFromString(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. Name the spiece.model of a T5.") from None
    except DecodeError as bad:
        raise DataError(f"{path}: not a SentencePiece model ({bad}). Name the spiece.model of a T5.") from None
    if not proto.pieces or proto.trainer_spec.model_type != _UNIGRAM:
        raise DataError(f"{path}: not a unigram model of SentencePiece. Use one, such as the spiece.model of a T5.")
    return proto


main = command.main_of(COMMAND, __doc__, _add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
