"""What a user may give as shards."""

from pathlib import Path

import pytest

from src.errors import DataError
from src.systems.interleaved.streaming import manifest
from src.systems.interleaved.streaming.manifest import Manifest, Shard
from src.systems.interleaved.streaming.shard_lists import ShardSource, list_shards
from tests.systems.interleaved.streaming.remote.s3_server import S3Server


def urls(*sources: str) -> list[str]:
    return [shard.url for shard in list_shards(sources)]


def test_files_patterns_and_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.tar", "a.tar", "s-09.tar", "s-10.tar", "odd[1].tar"):
        (tmp_path / name).touch()
    here = str(tmp_path.resolve())
    assert urls("b.tar", f"{here}/a.tar") == [f"{here}/b.tar", f"{here}/a.tar"]
    assert urls("[ab].tar", "s-*.tar") == [f"{here}/{name}" for name in ("a.tar", "b.tar", "s-09.tar", "s-10.tar")]
    assert urls("s-{09..10}.tar") == [f"{here}/s-09.tar", f"{here}/s-10.tar"]
    assert urls("odd[1].tar") == [f"{here}/odd[1].tar"], "a file that is there is no pattern"
    assert urls("s3://b/{8..10}.tar") == ["s3://b/8.tar", "s3://b/9.tar", "s3://b/10.tar"]
    assert urls("s3://b/{000..001}/{1..2}.tar") == [f"s3://b/{n}/{m}.tar" for n in ("000", "001") for m in (1, 2)]
    assert urls("pipe:s5cmd cat s3://b/{0..1}.tar | awk '{print}'") == [
        f"pipe:s5cmd cat s3://b/{n}.tar | awk '{{print}}'" for n in (0, 1)
    ]


def test_a_list_as_the_seed_has_it(tmp_path: Path):
    """One path or command on each line; empty lines, and blanks at the end of a line, say nothing."""
    (tmp_path / "lists").mkdir()
    command = "pipe:bash /code/webdataset_get_file.sh s3://b/x.tar"
    lines = tmp_path / "lists" / "train.txt"
    lines.write_text(f"{command} \n\n../tars/0.tar\r\n/data/1.tar\ns3://b/{{2..3}}.tar")
    assert urls(str(lines)) == [
        command,
        f"{(tmp_path / 'tars' / '0.tar').resolve()}",
        "/data/1.tar",
        "s3://b/2.tar",
        "s3://b/3.tar",
    ]


def test_a_prepared_folder(tmp_path: Path):
    shards = [Shard("0.tar", "0.idx", 1, 10, "captions"), Shard("s3://b/1.tar", "1.idx", 1, 10)]
    manifest.save(Manifest(tmp_path, shards))
    assert list_shards([str(tmp_path)]) == [
        ShardSource(str(tmp_path.resolve() / "0.tar"), "captions"),
        ShardSource("s3://b/1.tar"),
    ]


def test_a_duplicate_shard_is_named_with_both_places(tmp_path: Path):
    (tmp_path / "a.tar").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    lines = tmp_path / "train.txt"
    lines.write_text("s3://b/{0..9}.tar\na.tar\ns3://b/4.tar\n")
    with pytest.raises(
        DataError,
        match=r"train\.txt:3: s3://b/4\.tar is listed twice, first by .*train\.txt:1\. Each document would be read",
    ):
        list_shards([str(lines)])
    lines.write_text("link/a.tar\n")
    with pytest.raises(DataError, match=r"train\.txt:1: .*/a\.tar is listed twice, first by .*/a\.tar\."):
        list_shards([str(tmp_path / "a.tar"), str(lines)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"train\.txt: lists no shard\. Expected a path, s3://BUCKET/KEY or pipe:COMMAND on each line"),
        (" \n\n", r"train\.txt: lists no shard"),
        (
            "a.tar.gz",
            r'train\.txt:1: .*a compressed tar has no random access\. Unpack it, or use "pipe:gzip -dc FILE"',
        ),
        ("x.tar\ns3://b/{5..1}.tar", r"train\.txt:2: the range \{5\.\.1\} is empty"),
        ("s3://bucket", r"train\.txt:1: s3://bucket: no key"),
        (
            "https://h/0.tar",
            (r"train\.txt:1: https://h/0\.tar: expected a path, .* or pipe:COMMAND, such as pipe:curl -sSf URL"),
        ),
        ("none/*.tar", r"train\.txt:1: no file matches .*none/\*\.tar"),
        (b"\xff", "not UTF-8 text at byte 0"),
    ],
)
def test_wrong_lists(text: str | bytes, message: str, tmp_path: Path):
    lines = tmp_path / "train.txt"
    lines.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        list_shards([str(lines)])


@pytest.mark.parametrize(
    "text",
    [
        "https://me:pa55word@h/0.tar?sig=pa55word",
        "pipe:curl -u me:pa55word https://h/0.tar",
        "pipe:curl https://me:pa55word@h/0.tar",
        "pipe:curl -H 'Authorization: Bearer pa55word' https://h/0.tar",
        "pipe:curl 'https://h/0.tar?X-Amz-Signature=pa55word'",
    ],
)
def test_keys_are_refused_and_not_repeated(text: str):
    with pytest.raises(DataError) as error:
        list_shards([text])
    assert "pa55word" not in str(error.value)


def test_variables_of_commands_are_accepted():
    commands = [
        'pipe:curl -u "me:$PASSWORD" https://h/0.tar',
        'pipe:curl -H "Authorization: Bearer $TOKEN" https://h/0',
    ]
    assert urls(*commands) == commands


def test_nothing_given(tmp_path: Path):
    with pytest.raises(DataError, match="no shards are listed"):
        list_shards([])
    with pytest.raises(DataError, match=r"none\.txt: no such file"):
        list_shards([str(tmp_path / "none.txt")])
    with pytest.raises(DataError, match=r"shards\.json: no such file"):
        list_shards([str(tmp_path)])


def test_keys_of_s3(s3: S3Server):
    for key in ("keys/b.tar", "keys/a.tar", "keys/deep/c.tar", "keys/a.txt", "keys/x[1].tar", "keys/x1.tar"):
        s3.put(key, b"x")
    assert urls("s3://shards/keys/?.tar") == ["s3://shards/keys/a.tar", "s3://shards/keys/b.tar"]
    assert urls("s3://shards/ke*/[abc].tar") == ["s3://shards/keys/a.tar", "s3://shards/keys/b.tar"], "as of paths"
    assert urls("s3://shards/**/[abc].tar") == [f"s3://shards/keys/{name}.tar" for name in ("a", "b", "deep/c")]
    assert urls("s3://shards/keys/x[1].tar") == ["s3://shards/keys/x[1].tar"], "a key that is there is no pattern"
    with pytest.raises(DataError, match=r"s3://shards/none\*: no key matches"):
        list_shards(["s3://shards/none*"])
