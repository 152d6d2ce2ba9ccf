"""Programs that attack: each scores 0 and leaves nothing, and the next one still scores."""

import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from src.errors import ConfigError
from src.systems.assistants.rewards import sandbox
from src.systems.assistants.rewards.python import Config
from src.systems.assistants.rewards.sandbox import Limits
from tests.conftest import ROOT
from tests.systems.assistants.rewards.rollouts import needs_bubblewrap, rollout

GOOD = "def f(n):\n    return SECRET * n"


@pytest.fixture
def limits() -> Iterator[Limits]:
    """Limits that mark every process by a number in its command line; none may be left."""
    unique_limits = Limits(seconds=120, cpu_seconds=random.SystemRandom().randrange(10**6, 10**7))
    yield unique_limits
    assert not marked_processes(unique_limits)


def marked_processes(limits: Limits) -> list[psutil.Process]:
    """Those of sandboxes with these limits, but for zombies, which have no command line."""
    mark = limits.resources()
    return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or ())]


def new_secret() -> int:
    """A number that no program can guess, but would know again."""
    return 8642 * 10**9 + random.randrange(10**9)


def scores_of(program: str, limits: Limits, secret: int) -> list[float]:
    """Of the program as a value, and of a good one behind it."""
    programs = [program, "print(SECRET)".replace("SECRET", str(secret))]
    return Config(by="value", limits=limits).scores([rollout(text, answer=secret) for text in programs])


# Each prints the answer where it gets through.
INTRUDERS = {
    "loopback": "import socket\ns = socket.create_connection(('127.0.0.1', PORT))\nprint(ANSWER)",
    "own loopback": "import socket\nsocket.socket().bind(('127.0.0.1', 0))\nprint(ANSWER)",
    "reads a file": "print(open('FOLDER/answer').read() and ANSWER)",
    "writes a file": "open('FOLDER/written', 'w').write('x')\nprint(ANSWER)",
    "writes at the root": "open('/written', 'w').write('x')\nprint(ANSWER)",
    "writes into the system": "open('/usr/lib/written', 'w').write('x')\nprint(ANSWER)",
    "writes into Python": (
        "import os\nopen(os.path.dirname(os.__file__) + '/sitecustomize.py', 'w').write('x')\nprint(ANSWER)"
    ),
    "home": "import os\nassert os.listdir(os.path.expanduser('~'))\nprint(ANSWER)",
    "environment": "import os\nassert [name for name in os.environ if name not in ('PWD', 'LC_CTYPE')]\nprint(ANSWER)",
    "other processes": "import os\nos.listdir('/proc')\nprint(ANSWER)",
    "kernel": "import os\nos.listdir('/sys')\nprint(ANSWER)",
    "terminal": "open('/dev/tty', 'w')\nprint(ANSWER)",
    "parent": "import os\nassert os.getppid() != 0\nprint(ANSWER)",
    "fork": "import os\nos.fork()\nprint(ANSWER)",
    "process": "import subprocess\nsubprocess.run(['/usr/bin/env'], check=True)\nprint(ANSWER)",
    "namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\nprint(ANSWER)",
    "ptrace": "import ctypes\nassert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0\nprint(ANSWER)",
    "limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint(ANSWER)",
    "10 GB": "x = bytearray(10 << 30)\nprint(ANSWER)",
    "10 GB in a list": "x = []\nwhile len(x) < 10000:\n    x.append(bytearray(1 << 20))\nprint(ANSWER)",
    "10 GB in a file": (
        "with open('/tmp/x', 'wb') as f:\n    for _ in range(10000):\n        f.write(bytes(1 << 20))\nprint(ANSWER)"
    ),
    "10 GB in files": "for n in range(10000):\n    open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))\nprint(ANSWER)",
    "10 GB without a file": (
        "import os\nfor n in range(20):\n    os.write(os.memfd_create('x'), bytes(1 << 20))\nprint(ANSWER)"
    ),
    "prints 10 GB": "for _ in range(10000):\n    print('x' * (1 << 20))\nprint(ANSWER)",
    "floods": "import os\nfor fd in range(3, 64):\n    try:\n        while True:\n            os.write(fd, b'x' * "
    "65536)\n"
    "    except OSError:\n        pass\nprint(ANSWER)",
    "forges a message": "import json, os\nbody = json.dumps({'value': [{'complex': [10**400, 0]}, '']}).encode()\n"
    "for fd in range(3, 64):\n    try:\n        os.write(fd, len(body).to_bytes(4, 'big') + body)\n"
    "    except OSError:\n        pass\nos._exit(0)",
    "ends": "import os\nos._exit(0)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "deep": "x = []\nfor _ in range(10**5):\n    x = [x]\nx",
}


@needs_bubblewrap
@pytest.mark.parametrize("name", INTRUDERS)
def test_an_intruder_scores_nothing_and_leaves_nothing(
    name: str, limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRAINVAL_SECRET", "7")
    (tmp_path / "answer").write_text("7")
    secret = new_secret()
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = INTRUDERS[name].replace("PORT", str(server.getsockname()[1])).replace("FOLDER", str(tmp_path))
        assert scores_of(program.replace("ANSWER", str(secret)), limits, secret) == [0, 1]
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [path.name for path in tmp_path.iterdir()] == ["answer"]
    assert not any(Path(path).exists() for path in ("/written", "/usr/lib/written"))


ENDLESS = {
    "loop": "while True:\n    pass",
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "ignored signals": "import signal, time\nfor n in {*range(1, 32)} - {9, 19}:\n    signal.signal(n, "
    "signal.SIG_IGN)\n"
    "while True:\n    time.sleep(1)",
    "threads": "import threading, time\nwhile True:\n    try:\n        threading.Thread(target=time.sleep, "
    "args=(9,)).start()\n"
    "    except (RuntimeError, MemoryError):\n        pass",
}


@needs_bubblewrap
@pytest.mark.parametrize("name", ENDLESS)
def test_endless_programs_are_killed(name: str, limits: Limits):
    limits = limits.model_copy(update={"seconds": 1.0})
    (result,) = sandbox.run_programs([order(ENDLESS[name])], limits)
    assert (result.output, result.end_reason) == (b"", "time")
    assert not marked_processes(limits)


@needs_bubblewrap
def test_processor_time_is_limited_by_itself():
    (result,) = sandbox.run_programs([order("while True:\n    pass")], Limits(seconds=300, cpu_seconds=1))
    assert (result.output, result.end_reason) == (b"", "exit")


def order(source: str) -> sandbox.Program:
    return sandbox.Program("serve", sandbox.isolated.write_message(["evaluate", source]))


@needs_bubblewrap
def test_a_flood_is_read_up_to_its_limit():
    (result,) = sandbox.run_programs(
        [order("while True:\n    import os; os.write(4, bytes(65536))")], Limits(output_kb=256)
    )
    assert result.end_reason == "output"
    assert abs(len(result.output) - (256 << 10)) <= 64 << 10  # what one look at a pipe gives


TESTS = [
    "assert f(7)==SECRET * 7",
    "assert math.isclose(f(2), SECRET * 2)",
    "assert all([f(3) == SECRET * 3, abs(f(3) - SECRET * 3) < 1, str(f(3)) == str(SECRET * 3)])",
    "try:\n    value = f(4)\nexcept Exception:\n    value = 0\nassert value == SECRET * 4",
    "assert sorted([f(5), 0]) == [0, SECRET * 5] and isinstance(f(5), int) and f(5) in (SECRET * 5,)",
]
EQUAL = """
class Equal(int):
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda self, *_: True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
    __sub__ = __rsub__ = __abs__ = lambda self, *_: self
"""
LOOK = """
def look(start):
    import re, types
    seen, waiting = set(), [start]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        found = isinstance(thing, (int, str)) and re.search("(?:==|^)(8642[0-9]{9})", str(thing))
        if found:
            return int(found[1])
        if isinstance(thing, dict):
            waiting += list(thing.keys()) + list(thing.values())
        elif isinstance(thing, (list, tuple, set)):
            waiting += list(thing)
        elif isinstance(thing, types.FrameType):
            waiting += [thing.f_locals, thing.f_globals, thing.f_back]
        elif hasattr(thing, "__dict__"):
            waiting.append(vars(thing))
    return 0
"""
CHEATS = {
    "ends at once": "import os\nos._exit(0)",
    "leaves at once": "import sys\nsys.exit(0)",
    "ends when called": "import os\ndef f(n):\n    os._exit(0)",
    "leaves when called": "def f(n):\n    raise SystemExit(0)",
    "ends later": (
        "import atexit, os, threading\natexit.register(os._exit, 0)\nthreading.Timer(0, os._exit, [0]).start()\nf = int"
    ),
    "no f": "g = 1",
    "equals everything": EQUAL + "f = Equal",
    "equals everything by itself": EQUAL + "f = type('F', (Equal,), {'__call__': lambda self, n: self})()",
    "an object": EQUAL + "class O:\n    __eq__ = Equal.__eq__\n    __hash__ = None\nf = lambda n: O()",
    "not a number": "f = lambda n: float('nan')",
    "changed builtins": "import builtins\nfor name in ('all', 'abs', 'sorted', 'isinstance', 'str', 'int'):\n"
    "    setattr(builtins, name, lambda *a: True)\nbuiltins.AssertionError = type('A', (BaseException,), {})\nf = "
    "lambda n: 0",
    "names of builtins": (
        "all = abs = sorted = isinstance = str = lambda *a: True\nclass AssertionError(Exception): "
        "pass\nf = lambda n: 0"
    ),
    "names of modules": "class math:\n    isclose = lambda *a: True\nf = lambda n: 0",
    "kills": "import os, signal\ndef f(n):\n    for pid in (os.getppid(), 0, 1, 2, 3, -1):\n        try:\n"
    "            os.kill(pid, 9)\n        except OSError:\n            pass\n    return 0",
    "reads descriptors": "import os\ndef f(n):\n    for fd in range(64):\n        try:\n            os.lseek(fd, 0, "
    "0)\n"
    "            text = os.read(fd, 10**6)\n            if b'assert' in text:\n                return 1\n        "
    "except OSError:\n"
    "            pass\n    return 0",
    "searches frames": LOOK + "import sys\ndef f(n):\n    return look(sys._getframe()) * n",
    "searches all objects": LOOK + "import gc\ndef f(n):\n    return look([o for o in gc.get_objects()]) * n",
    "searches files": "import os\ndef f(n):\n    for folder, _, names in os.walk('/tmp'):\n        for name in names:\n"
    "            if 'assert f' in open(os.path.join(folder, name)).read():\n                return 1\n    return 0",
    "guesses a nonce": "import os\nlines = ''.join(f'{\"0\" * 32} {n}\\n' for n in [0, 1, 2, 3, 4, 'end']).encode()\n"
    "for fd in range(3, 64):\n    try:\n        os.write(fd, b'ready\\n' + lines)\n    except OSError:\n        "
    "pass\nf = lambda n: 0",
    "answers for itself": "import json, os\nfor reply in (['f'], {'object': 0}, [{'object': 0}, []], True):\n"
    "    body = json.dumps({'value': reply}).encode()\n    for fd in range(3, 64):\n        try:\n"
    "            os.write(fd, len(body).to_bytes(4, 'big') + body)\n        except OSError:\n            pass\nf = "
    "lambda n: True",
    "a long answer": (
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'\\xff' * 4)\n    except "
        "OSError:\n        pass"
    ),
    "a deep answer": "def f(n):\n    x = []\n    for _ in range(500):\n        x = [x]\n    return x",
    "turns its helper": (
        "import sys\nouter = sys._getframe(3).f_globals\nouter['write_value'] = lambda *a: "
        "{'object': 0}\nf = lambda n: 0"
    ),
    "a startup file": "open('/tmp/sitecustomize.py', 'w').write('import os; os._exit(0)')\n"
    "open('/tmp/math.py', 'w').write('isclose = lambda *a: True')\nf = lambda n: 0",
    "a generator exit": "def f(n):\n    raise GeneratorExit",
    "an endless list": (
        "class f:\n    def __init__(self, n): pass\n    def __iter__(self):\n        return iter(int, 1)"
    ),
}


def test_the_search_of_the_cheats_finds_planted_values():
    calls = [
        (
            "def inner():\n    return look(sys._getframe())\ndef outer():\n    kept = ['assert f(1)=={}'.format(8642 "
            "* 10**9 + 5)]\n"
            "    return inner()\nprint(outer())"
        ),
        "print(look([[{1: (8642 * 10**9 + 5,)}]]), look([2**32 - 1, 'assert']))",
    ]
    outputs = [
        subprocess.check_output([sys.executable, "-I", "-S", "-c", f"import sys\n{LOOK}{call}"], text=True)
        for call in calls
    ]
    assert outputs == ["8642000000005\n", "8642000000005 0\n"]


@needs_bubblewrap
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_scores_nothing(name: str, limits: Limits):
    secret = new_secret()
    tests = [test.replace("SECRET", str(secret)) for test in TESTS]
    programs = [CHEATS[name], GOOD.replace("SECRET", str(secret))]
    config = Config(by="tests", share=True, limits=limits)
    assert config.scores([rollout(text, tests=tests) for text in programs]) == [0, 1]


@needs_bubblewrap
def test_a_test_that_ends_its_own_process_is_not_held():
    config = Config(by="tests")
    assert config.scores(
        [rollout("f = 1", tests=["import os\nos._exit(0)"]), rollout("f = 1", tests=["raise SystemExit(0)"])]
    ) == [0, 0]


@needs_bubblewrap
def test_an_end_is_no_error_that_a_test_waits_for():
    tests = ["try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError"]
    programs = ["import os\ndef f(n):\n    os._exit(0)", "def f(n):\n    raise SystemError", "def f(n):\n    return n"]
    assert Config(by="tests").scores([rollout(text, tests=tests) for text in programs]) == [0, 1, 0]


@needs_bubblewrap
def test_many_at_once_are_in_order():
    limits = Limits(max_parallel=8)
    assert (
        Config(by="value", limits=limits).scores([rollout(str(n), answer=n - n % 3) for n in range(24)])
        == [1, 0, 0] * 8
    )


TRAINING = """
import sys
from src.systems.assistants.rewards import sandbox
limits = sandbox.Limits.model_validate_json(sys.argv[1])
order = sandbox.isolated.write_message(["evaluate", "while True: pass"])
sandbox.run_programs([sandbox.Program("serve", order)] * 2, limits)
"""


@needs_bubblewrap
def test_no_program_outlives_a_training_that_is_killed(limits: Limits):
    limits = limits.model_copy(update={"max_parallel": 2})
    training = subprocess.Popen([sys.executable, "-c", TRAINING, limits.model_dump_json()], cwd=ROOT)
    try:
        wait_until(
            lambda: sum(process.cpu_times().user > 0.3 for process in marked_processes(limits)) == 2
        )  # both loops run
    finally:
        training.kill()
        training.wait()
    wait_until(lambda: not marked_processes(limits))


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def _asked_again() -> Iterator[None]:
    sandbox.require.cache_clear()
    yield
    sandbox.require.cache_clear()


@pytest.mark.usefixtures("_asked_again")
@pytest.mark.parametrize("by", ["value", "tests"])
def test_a_machine_without_bubblewrap_is_refused(by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    config = Config.model_validate({"by": by})
    with pytest.raises(
        ConfigError, match=r"^running programs that a model wrote requires bubblewrap, .*: apt-get install bubblewrap$"
    ):
        config.scores([rollout("1", answer=1, tests="assert 1")])


@pytest.mark.usefixtures("_asked_again")
def test_a_machine_without_namespaces_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "bwrap").write_text(
        f"#!{shutil.which('sh')}\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"cannot start a program on this machine: bwrap: No permissions to create new namespace\. Allow",
    ):
        sandbox.require()
