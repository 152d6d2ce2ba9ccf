"""Conversations: the ids of the processors' chat templates, loss on answers only, and refused conversations."""

import base64
import io
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.interleaved import digit_pages, index
from data_prep.interleaved.write import Document, Part, Writing, write
from src.data.text import tokenizers
from src.errors import DataError, UserError
from src.experiments.config import Places, Problems
from src.experiments.kinds import TokenizerSource
from src.experiments.registry import DATASETS, bind
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.chats import ChatTokens
from src.systems.interleaved.streaming.images import ImagesConfig
from src.systems.interleaved.streaming.tar_index import PROMPT, TEXT
from tests.systems.interleaved.streaming import pages
from tests.systems.interleaved.streaming.test_tar_index import tar_of

END = "<end_of_utterance>"
SMOLVLM = digit_pages.CHAT_TEMPLATE
LINES = ["Assistant: User: System: It is a cat. Where are they? The digits are 1 2 3.", "what is it"] * 3
IDEFICS3 = SMOLVLM.replace("<|im_start|>", "<|begin_of_text|>").replace(
    "message['role'] | capitalize", "message['role'].capitalize()"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + SMOLVLM
IDEFICS2 = SMOLVLM.removeprefix("<|im_start|>")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smolvlm": (SMOLVLM, {"max_size": 2 * pages.SIDE, "enlarge": True}),
    "idefics3": (IDEFICS3, {"max_size": 2 * pages.SIDE, "enlarge": True}),
    "idefics2": (IDEFICS2, {"max_size": pages.SIDE, "style": "idefics2"}),
}
FAMILY = pytest.mark.parametrize("family", FAMILIES)
IMAGE: dict[str, Any] = {"type": "image"}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image_at(name: Any) -> dict[str, Any]:
    return {**IMAGE, "path": name}


def turns(*contents: Any) -> list[dict[str, Any]]:
    """Messages of the user and of the assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CHATS: list[list[dict[str, Any]]] = [
    turns([IMAGE, text("What is it?")], [text("It is a cat.")]),
    turns([text("What are"), IMAGE, IMAGE, text(" these?")], [text("Cats")], [text("And"), IMAGE], [text("a\ndog. ")]),
    turns([text("Two"), text(" texts")], [text("One"), text(" answer")], [IMAGE], [text("")], [text("")], [text("?")]),
    [{"role": "system", "content": [text("Be brief.")]}, *turns([IMAGE, IMAGE], [text(" Äh \U0001f600")])],
]


def make_tokenizer(family: str) -> Any:
    """Tokenizers as these models have them: BPE of bytes, or of pieces with a start token; whose end tokens differ."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    images = ImagesConfig(**{**pages.IMAGES, **FAMILIES[family][1]}).special_tokens()
    begin, end = {"smolvlm": ("<|im_start|>", END), "idefics3": ("<|begin_of_text|>", "<|end_of_text|>")}.get(
        family, ("<s>", "</s>")
    )
    special = [*dict.fromkeys(["<unk>", begin, end, END])]
    if family == "idefics2":
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = ["▁"]
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if family == "idefics2":  # like Mistral's
        backend.pre_tokenizer, backend.normalizer = None, normalizer
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = [(begin, backend.token_to_id(begin))]
    if family != "smolvlm":
        backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=pieces)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end, pad_token="<unk>")
    tokenizer.add_special_tokens({"extra_special_tokens": [END, *images]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = FAMILIES[family][0]
    return tokenizer


def make_processor(family: str, tokenizer: Any) -> Any:
    """transformers' own. SmolVLM's writes the ids of Idefics3's, but needs packages for videos."""
    from transformers import Idefics2Processor, Idefics3Processor
    from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    side = pages.SIDE
    if family == "idefics2":
        reader = Idefics2ImageProcessorPil(do_image_splitting=False, size={"height": side, "width": side})
        return Idefics2Processor(reader, tokenizer, image_seq_len=1, chat_template=tokenizer.chat_template)
    reader = Idefics3ImageProcessorPil(max_image_size={"longest_edge": side}, size={"longest_edge": 2 * side})
    return Idefics3Processor(reader, tokenizer, image_seq_len=1, chat_template=tokenizer.chat_template)


def members(key: str, messages: Any, images: int | None = None) -> list[tuple[str, bytes]]:
    """A document of messages in JSON, and its images, of which every second one is wide."""
    count = json.dumps(messages).count('"image"') if images is None else images
    pictures = [pages.picture(i, ((1 + i % 2) * pages.SIDE, pages.SIDE)) for i in range(count)]
    names = [f"{key}.jpg"] if count == 1 else [f"{key}.{i}.jpg" for i in range(count)]
    return [*zip(names, pictures, strict=True), (f"{key}.json", json.dumps({"messages": messages}).encode())]


def write_chats(folder: Path, chats: list[Any], split: str = "train", *more: str) -> int:
    """Index a tar of conversations as source "x"; returns the exit code."""
    documents = [each for i, chat in enumerate(chats) for each in members(str(i), chat)]
    return index_tar(folder, documents, split, *more)


def index_tar(folder: Path, documents: list[tuple[str, bytes]], split: str = "train", *more: str) -> int:
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.tar").write_bytes(tar_of(documents))
    fields = json.dumps({"messages": "json:messages"})
    words = [str(folder / f"{split}.tar"), "--output", str(folder / "x" / split), "--processes", "1"]
    return index.main([*words, "--fields", fields, *more])


def config(family: str = "smolvlm", **more: Any) -> dict[str, Any]:
    sizes = {"sequence_tokens": 400, "max_frames": 60, "rules": {"too_long": "drop"}}
    images = {**pages.IMAGES, **FAMILIES[family][1]}
    return pages.config({"x": {"path": "x", "chat": True}}, **{**sizes, "images": images, **more})


def open_data(folder: Path, tokenizer: Any, family: str = "smolvlm", split: str = "train", **more: Any) -> Any:
    return bind(DATASETS, config(family, **more)).build(Places(folder, folder), tokenizer, split, 0)


def with_pictures(folder: Path, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the images of `members`, for a processor."""
    pictures = iter(Image.open(io.BytesIO(content)) for name, content in members("0", messages) if name.endswith("jpg"))
    return [
        {
            **each,
            "content": [
                {**item, "image": next(pictures)} if item["type"] == "image" else item for item in each["content"]
            ],
        }
        for each in messages
    ]


def learned_ids(row: Any) -> list[int]:
    return [token for token, is_learned in zip(row.input_ids, row.loss_mask, strict=True) if is_learned]


def encode(processor: Any, messages: list[dict[str, Any]], **more: Any) -> Any:
    return processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt", **more)


def test_counts_are_used_after_a_model_added_its_image_tokens(tmp_path: Path):
    folder = tmp_path / "tokenizer"
    digit_pages._tokenizer(folder, True)
    spelling = turns([text("What is <fake_token_around_image>?"), IMAGE], [text("It is <global-img>.")])
    assert write_chats(tmp_path, [*CHATS, spelling], "train", "--tokenizer", str(folder)) == 0
    tokenizer = tokenizers.load(folder, ImagesConfig(**config()["images"]).special_tokens())
    data = open_data(tmp_path, tokenizer)
    assert data.documents[0]._plan(0).tokens
    for number in range(len(CHATS) + 1):
        (piece,) = data.pieces(number)
        assert piece.tokens == len(data.sample(0, number).input_ids)


@FAMILY
@pytest.mark.parametrize("with_counts", [True, False])
def test_ids_and_pixels_are_those_of_apply_chat_template(family: str, with_counts: bool, tmp_path: Path):
    tokenizer = make_tokenizer(family)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    count_words = ["--tokenizer", str(tmp_path / "tokenizer")] if with_counts else []
    assert write_chats(tmp_path, CHATS, "train", *count_words) == 0
    data, processor = open_data(tmp_path, tokenizer, family), make_processor(family, tokenizer)
    has_counts = with_counts and family != "idefics2"  # an index does not know that it adds spaces
    assert (data.documents[0]._plan(0).tokens != []) == has_counts
    for number, messages in enumerate(CHATS):
        row, theirs = data.sample(0, number), encode(processor, with_pictures(tmp_path, messages))
        assert tokenizer.decode(row.input_ids) == tokenizer.decode(theirs["input_ids"][0])
        assert row.input_ids == theirs["input_ids"][0].tolist()
        assert row.lengths == [len(row.input_ids)], "an end token within a conversation is no border of documents"
        (piece,) = data.pieces(number)
        assert piece.tokens == len(row.input_ids)
        if row.frames:
            pixels = np.concatenate(row.frames)
            np.testing.assert_allclose(theirs["pixel_values"][0].numpy(), pixels, atol=1e-6)
        else:
            assert "pixel_values" not in theirs


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (SMOLVLM.replace(END, "<unk>" + END), f"<unk>{END}"),
        (SMOLVLM + "{% if not add_generation_prompt %}<unk>{% endif %}", END),
        (SMOLVLM.replace("{{ message['role']", "<unk>{{ message['role']").replace("'Ass", "'<unk>Ass"), END),
    ],
)
def test_end_of_an_answer_is_the_last_control_token_before_the_next_message(template: str, end: str):
    tokenizer = make_tokenizer("smolvlm")
    tokenizer.chat_template = template
    tokens = ChatTokens(tokenizer)
    ids, masks = tokens.encode_with_loss([PROMPT, TEXT] * 2, [b"q", b"a"] * 2)
    pairs = zip(chain(*ids), chain(*masks), strict=True)
    assert tokenizer.decode([token for token, is_learned in pairs if is_learned]) == f" a{end}" * 2
    assert tokens.answer_ends == [tokenizer.convert_tokens_to_ids(END)]


def test_image_in_base64_is_that_of_a_member(tmp_path: Path):
    content = base64.b64encode(pages.picture(0)).decode()
    base64_turns = turns(
        [{**IMAGE, "url": f"data:image/png;base64,{content}"}, *CHATS[0][0]["content"][1:]], [text("a")]
    )
    documents = [*members("0", turns(CHATS[0][0]["content"], [text("a")])), *members("1", base64_turns, images=0)]
    assert index_tar(tmp_path, documents) == 0
    rows = [open_data(tmp_path, make_tokenizer("smolvlm")).sample(0, number) for number in range(2)]
    assert rows[0].input_ids == rows[1].input_ids
    np.testing.assert_array_equal(rows[0].frames, rows[1].frames)


@FAMILY
def test_only_answers_and_their_end_tokens_are_learned(family: str, tmp_path: Path):
    """Compared with the lengths of prompts that the processor makes."""
    tokenizer = make_tokenizer(family)
    assert write_chats(tmp_path, CHATS) == 0
    data, processor = open_data(tmp_path, tokenizer, family), make_processor(family, tokenizer)
    end = tokenizer.convert_tokens_to_ids(END)
    for number, chat in enumerate(CHATS):
        messages = with_pictures(tmp_path, chat)
        expected = [False] * encode(processor, messages)["input_ids"].shape[1]
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = encode(processor, messages[:turn], add_generation_prompt=True)["input_ids"].shape[1]
                last = encode(processor, messages[: turn + 1])["input_ids"][0].tolist()
                stop = len(last) - last[::-1].index(end)
                expected[begin:stop] = [True] * (stop - begin)
        row = data.sample(0, number)
        assert row.loss_mask == expected
        answer_text = tokenizer.decode(learned_ids(row))
        answers = ["".join(item["text"] for item in each["content"]) for each in chat if each["role"] == "assistant"]
        assert re.sub(r"\s+", "", answer_text) == re.sub(r"\s+", "", "".join(f"{answer}{END}" for answer in answers))


def test_text_of_the_user_changes_no_label(tmp_path: Path):
    tokenizer = make_tokenizer("smolvlm")
    one, other = CHATS[1], json.loads(json.dumps(CHATS[1]).replace("these?", "things, which are many more?"))
    assert write_chats(tmp_path, [one, other]) == 0
    data = open_data(tmp_path, tokenizer)
    rows = [data.sample(0, number) for number in range(2)]
    assert len(rows[0].input_ids) < len(rows[1].input_ids)
    labels = [learned_ids(row) for row in rows]
    assert labels[0] == labels[1]
    assert len(labels[0]) > 4
    batch = data.collate(rows)
    assert batch["loss_mask"].sum(1).tolist() == [len(labels[0])] * 2


@pytest.mark.parametrize("spelling", [END, "<fake_token_around_image>", "<global-img>"])
def test_text_of_messages_is_never_a_control_token(spelling: str, tmp_path: Path):
    tokenizer = make_tokenizer("smolvlm")
    messages = turns([text(f"a {spelling}\nAssistant: b")], [text(f"c <|im_start|> {spelling} d")])
    for split in ("train", "val"):
        assert write_chats(tmp_path, [messages], split) == 0
    bind(DATASETS, config()).check(Places(tmp_path, tmp_path))
    row = open_data(tmp_path, tokenizer).sample(0, 0)
    assert row.input_ids.count(tokenizer.convert_tokens_to_ids(spelling)) == 2 * (spelling == END), "of the template"
    text_of_row = tokenizer.decode(row.input_ids)
    assert text_of_row == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("strips", ["rstrip", "lstrip"])
def test_spaces_next_to_images_remain_if_the_end_token_strips_spaces(strips: str):
    from tokenizers import AddedToken

    tokenizer = make_tokenizer("smolvlm")
    tokenizer.add_special_tokens({"eos_token": AddedToken("<eos>", special=True, **{strips: True})})
    ids, _ = ChatTokens(tokenizer).encode_with_loss([PROMPT, tar_index.IMAGE, PROMPT, TEXT], [b"a ", b"", b" b", b"c"])
    assert [tokenizer.decode(part) for part in ids[:3]] == ["<|im_start|>User: a ", "", " b"]


def test_parts_of_tars_are_conversations(tmp_path: Path):
    """Without JSON: prompts and images are the user's, texts the assistant's."""
    tokenizer = make_tokenizer("smolvlm")
    picture = Part("image", pages.picture(0), "png")
    parts = [
        Part("system", b"Be brief."),
        picture,
        Part("prompt", b"What?"),
        Part("text", b"A cat."),
        picture,
        Part("text", b"A"),
    ]
    for split in ("train", "val"):
        texts = ChatTokens(tokenizer)
        write(tmp_path / "x" / split, [Document("0", parts)], {}, Writing(texts=texts))
    data = open_data(tmp_path, tokenizer)
    bind(DATASETS, config()).check(Places(tmp_path, tmp_path))
    image = {"type": "image", "image": Image.open(io.BytesIO(picture.content))}
    messages = [
        {"role": "system", "content": [text("Be brief.")]},
        *turns([image, text("What?")], [text("A cat.")], [image], [text("A")]),
    ]
    theirs = encode(make_processor("smolvlm", tokenizer), messages)
    assert data.sample(0, 0).input_ids == theirs["input_ids"][0].tolist()


@FAMILY
def test_prompt_of_a_question_is_that_of_the_template(family: str, tmp_path: Path):
    tokenizer = make_tokenizer(family)
    chats = [CHATS[0], CHATS[1], CHATS[3]]
    for split in ("train", "val"):
        assert write_chats(tmp_path, chats, split) == 0
    val, processor = open_data(tmp_path, tokenizer, family, "val"), make_processor(family, tokenizer)
    assert val.num_questions == len(chats)
    for number, chat in enumerate(chats):
        turn = 1 + next(i for i, message in enumerate(chat) if message["role"] == "user")
        question = with_pictures(tmp_path, chat)[:turn]
        expected = encode(processor, question, add_generation_prompt=True)
        row = val.prompt(number)
        assert row.input_ids == expected["input_ids"][0].tolist()
        assert not any(row.loss_mask)
        assert len(np.concatenate(row.frames)) == expected["pixel_values"].shape[1]
    assert [val.row(i)["answer"] for i in range(3)] == ["It is a cat.", "Cats", " Äh \U0001f600"]
    assert [val.row(i)["question"] for i in range(3)] == ["What is it?", "What are  these?", ""]
    assert val.answer_ends == [tokenizer.convert_tokens_to_ids(END)]


def test_conversations_longer_than_a_row_are_left_out(tmp_path: Path):
    assert write_chats(tmp_path, [CHATS[0], turns([text("x" * 90)], [text("y")])]) == 0
    data = open_data(tmp_path, make_tokenizer("smolvlm"), sequence_tokens=60)
    assert [len(data.pieces(number)) for number in range(2)] == [1, 0]
    with pytest.raises(Problems, match=r"rules\.too_long"):
        bind(DATASETS, config(rules={"too_long": "cut"}))


BAD = "its messages are not a conversation that ends with an answer"
OTHER_IMAGES = "its messages have other images than the tar"


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (members("1", turns([text("no answer")])), BAD),
        (members("1", turns([text("a")], [text("b")], [text("c")])), BAD),
        (members("1", [*turns([text("a")]), *turns([text("b")], [text("c")])]), BAD),
        (members("1", [{"role": "tool", "content": "a"}]), BAD),
        (members("1", turns([text("a")], [IMAGE])), BAD),
        (members("1", turns([{"type": "video"}], [text("b")])), BAD),
        (members("1", turns([], [text("b")])), BAD),
        (members("1", turns([text("a <image>")], [text("b")])), BAD),
        (members("1", {}), BAD),
        (members("1", CHATS[0], images=2), OTHER_IMAGES),
        (members("1", CHATS[1], images=2), OTHER_IMAGES),
        (members("1", CHATS[0], images=0), OTHER_IMAGES),
        (members("1", turns([image_at("gone.jpg")], [text("b")]), images=0), OTHER_IMAGES),
        (members("1", turns([image_at("0.jpg")], [text("b")]), images=2), OTHER_IMAGES),
        (members("1", turns([image_at("1.jpeg"), image_at("0.jpeg")], [text("b")]), images=2), OTHER_IMAGES),
        (members("1", turns([image_at("gone.jpg"), IMAGE], [text("b")]), images=2), OTHER_IMAGES),
        (members("1", turns([image_at(1), IMAGE, IMAGE], [text("b")]), images=2), BAD),
        (members("1", turns([image_at(0)], [text("b")]), images=1), BAD),
        (members("1", turns([image_at(True)], [text("b")]), images=1), BAD),
        ([("1.json", b"{")], "its JSON does not have the mapped fields"),
    ],
)
def test_a_document_that_is_no_conversation_is_found_by_the_check(
    document: list[tuple[str, bytes]], reason: str, tmp_path: Path
):
    good = members("0", CHATS[0])
    for split, documents in (("train", [*good, *document]), ("val", good)):
        assert index_tar(tmp_path, documents, split) == 0
    assert manifest.load(tmp_path / "x" / "train").facts["bad_documents"] == {reason: 1}
    with pytest.raises(UserError, match=rf"data\.sources\.x: document 1 of .*train\.tar: {reason}"):
        bind(DATASETS, config()).check(Places(tmp_path, tmp_path))


IMAGE_URL = {"type": "image_url", "image_url": {"url": "0.jpg"}}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (members("1", turns([IMAGE_URL], [text("b")]), images=0), ["1.json", "messages[0]", "content", "image_url"]),
        (members("1", turns([text("a")], [image_at("0.jpg")])), ["1.jpg", "messages[1]", '"path": "0.jpg"']),
        (members("1", [{"role": "tool", "content": "a"}]), ["1.json", "messages[0]", "role", "'tool'"]),
        (members("1", CHATS[0], images=0), ["1.json", "1 images in messages", "0 in the tar"]),
        (members("1", turns([image_at("gone.jpg")], [text("b")])), ["1.jpg", "'gone.jpg'"]),
    ],
)
def test_report_and_check_describe_the_first_bad_messages(
    document: list[tuple[str, bytes]], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert index_tar(tmp_path / "alone", document) == 1
    messages = [capsys.readouterr().err]
    good = members("0", CHATS[0])
    for split, documents in (("train", [*good, *document]), ("val", good)):
        assert index_tar(tmp_path, documents, split) == 0
    messages.append(capsys.readouterr().out)
    with pytest.raises(UserError) as error:
        bind(DATASETS, config()).check(Places(tmp_path, tmp_path))
    for message in [*messages, str(error.value)]:
        assert [word for word in words if word not in message] == []


def test_conversation_that_the_template_rejects_is_named_when_tokens_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tokenizer = make_tokenizer("smolvlm")
    tokenizer.chat_template = NO_SYSTEM
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert write_chats(tmp_path, CHATS, "train", "--tokenizer", str(tmp_path / "tokenizer")) == 1
    assert f"{tmp_path / 'train.tar'}: document 3: --tokenizer: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "parts",
    [
        [Part("text", b"assistant first")],
        [Part("prompt", b"a"), Part("text", b"b"), Part("prompt", b"c")],
        [Part("prompt", b"no answer")],
        [Part("prompt", b"a"), Part("system", b"late"), Part("text", b"b")],
    ],
)
def test_parts_that_are_no_conversation_are_found_by_the_check(parts: list[Part], tmp_path: Path):
    good = Document("0", [Part("prompt", b"a"), Part("text", b"b")])
    write(tmp_path / "x" / "train", [good, Document("1", parts)], {}, Writing())
    write(tmp_path / "x" / "val", [good], {}, Writing())
    with pytest.raises(UserError, match=r"data\.sources\.x: document 1 of shard-00000\.tar"):
        bind(DATASETS, config()).check(Places(tmp_path, tmp_path))


def test_messages_without_chat_are_refused(tmp_path: Path):
    for split in ("train", "val"):
        assert write_chats(tmp_path, CHATS[:1], split) == 0
    plain = bind(DATASETS, {**config(), "sources": {"x": {"path": "x"}}})
    with pytest.raises(UserError, match=r"data\.sources\.x\.chat: false"):
        plain.check(Places(tmp_path, tmp_path))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ({"other": SMOLVLM}, "no chat template"),
        (SMOLVLM.replace("line['text'] ", "line['text'] | trim "), "changes the text"),
        (SMOLVLM.replace("line['text'] ", "line['text'].strip('\n') "), "changes the text"),
        (SMOLVLM.replace("line['text'] ", "line['text'] | e "), "changes the text"),
        (SMOLVLM.replace("line['text'] ", "line['text'].split('</think>')[-1] "), "changes the text"),
        (SMOLVLM.replace("line['text'] ", "line['text'].replace('\t', ' ') "), "changes the text"),
        (SMOLVLM.replace(END, ""), "no control token"),
        (SMOLVLM.replace("'Assistant:'", "'Model:'"), "does not start the answer"),
        (SMOLVLM.replace("'<image>'", "'<img>'"), "each text and image once"),
        (SMOLVLM.replace("{% for line", "{{ message['content'][0]['text'] }}{% for line"), "each text and image once"),
        ("{{ raise_exception('never') }}", "never"),
        (SMOLVLM + "{{ strftime_now('%d') }}", "date"),
    ],
)
def test_templates_that_cannot_be_trained_with_are_refused_before_the_start(
    template: Any, message: str, tmp_path: Path
):
    tokenizer = make_tokenizer("smolvlm")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = bind(DATASETS, config())
    with pytest.raises(DataError, match=rf"data\.sources\.x\.chat: .*{message}"):
        data.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path / "tokenizer"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (NO_SYSTEM, "none"),
        (SMOLVLM.replace("in messages", "in messages if message.role != 'system'"), "each text and image once"),
        (
            SMOLVLM.replace("line['text'] ", "(line['text'] | trim if message.role == 'system' else line['text']) "),
            "changes",
        ),
    ],
)
def test_templates_that_write_no_system_message_are_refused_for_conversations_with_one(
    template: str, message: str, tmp_path: Path
):
    tokenizer = make_tokenizer("smolvlm")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data, source = bind(DATASETS, config()), TokenizerSource(tmp_path / "tokenizer")
    for split in ("train", "val"):
        assert write_chats(tmp_path, CHATS[:1], split) == 0
    data.check_tokenizer(Places(tmp_path, tmp_path), source)
    assert write_chats(tmp_path, CHATS, "val") == 0
    with pytest.raises(DataError, match=rf"data\.sources\.x\.chat: .*{message}"):
        data.check_tokenizer(Places(tmp_path, tmp_path), source)


def test_template_of_the_processor_is_used(tmp_path: Path):
    """Older models have it in chat_template.json."""
    tokenizer = make_tokenizer("smolvlm")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data, source = bind(DATASETS, config()), TokenizerSource(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="chat"):
        data.check_tokenizer(Places(tmp_path, tmp_path), source)
    (tmp_path / "tokenizer" / "chat_template.json").write_text(json.dumps({"chat_template": SMOLVLM}))
    data.check_tokenizer(Places(tmp_path, tmp_path), source)


@pytest.mark.parametrize(
    "fields",
    ['{"messages": "json"}', '{"messages": "json:m", "text": "txt"}', '{"messages": ["json:a", "json:b"]}'],
)
def test_mapping_of_messages_is_one_value(fields: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.tar").write_bytes(tar_of(members("0", CHATS[0])))
    assert index.main([str(tmp_path / "a.tar"), "--output", str(tmp_path / "x"), "--fields", fields]) == 1
    assert "messages" in capsys.readouterr().err


def test_tokens_of_conversations_need_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.tar").write_bytes(tar_of(members("0", CHATS[0])))
    assert index.main([str(tmp_path / "a.tar"), "--chat"]) == 1
    assert "--chat" in capsys.readouterr().err


def test_real_conversations_with_images(shared_data: Path, tmp_path: Path):
    """Of LLaMA-Factory, with <image> in strings."""
    folder = shared_data / "image" / "interleaved_chat"
    chats = json.loads((folder / "mllm_demo.json").read_text())
    documents = list[tuple[str, bytes]]()
    for number, chat in enumerate(chats):
        contents = [(folder / name).read_bytes() for name in chat["images"]]
        documents += [(f"{number}.{i}.jpg", content) for i, content in enumerate(contents)]
        documents.append((f"{number}.json", json.dumps({"messages": chat["messages"]}).encode()))
    for split in ("train", "val"):
        assert index_tar(tmp_path, documents, split, "--verify") == 0
    tokenizer = make_tokenizer("smolvlm")
    data = open_data(tmp_path, tokenizer, sequence_tokens=1000)
    bind(DATASETS, config()).check(Places(tmp_path, tmp_path))
    for number, chat in enumerate(chats):
        row = data.sample(0, number)
        answer_text = tokenizer.decode(learned_ids(row))
        answers = [message["content"] for message in chat["messages"] if message["role"] == "assistant"]
        assert answer_text == "".join(f" {answer}{END}" for answer in answers)
        assert len(row.frames) == len(chat["images"])
