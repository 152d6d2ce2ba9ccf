"""A web page to chat with one model, or with two models side by side to choose the better reply.

python -m src.systems.assistants.serving.page RUN          a conversation
python -m src.systems.assistants.serving.page RUN OTHER    both answer; the conversation continues with the better reply
python -m src.systems.assistants.serving.page RUN RUN      two samples of one

Each choice is appended to --output as a row. Prepare the file to train reward models and preferences on it:
python -m data_prep.assistants.prepare_conversations --form ranked --train results/data/preferences.jsonl --name
preferences
"""

import argparse
import asyncio
import html
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import panel as pn

from src.errors import ConfigError, UserError
from src.experiments.config import Places
from src.models.load import move
from src.serving.chat import add_options, generation_options
from src.serving.pretrained import SOURCE, load_writer, source_name
from src.support.command_line import make_parser, parse_arguments, run_command
from src.support.served_page import add_address, serve_page
from src.systems.assistants.serving.conversation import Talk
from src.systems.assistants.serving.preferences import Conversation, Side, check_output

PORT = 5007
MAX_RUNS = 2
_WRAPPED = {"white-space": "pre-wrap", "overflow-wrap": "anywhere"}
_SEND, _CLEAR, _NONE = (
    (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="none" stroke="currentColor" '
        f'stroke-width="2">{shape}</svg>'
    )
    for shape in ('<path d="M4 12h15M13 6l6 6-6 6"/>', '<path d="M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13"/>', "")
)
"""Inline icons, as Panel would load its icons from the internet."""


class _Message(pn.chat.ChatMessage):
    """A chat message without icons."""

    def __init__(self, *args: Any, **params: Any) -> None:
        super().__init__(*args, **params)
        self.edit_icon.param.update(icon=_NONE, active_icon=_NONE)  # Panel renders the hidden icon too


class _Chat(pn.chat.ChatInterface):
    """A chat of such messages."""

    _message_type = _Message


def make_page(conversation: Conversation) -> pn.viewable.Viewable:
    """The page of a conversation."""
    pn.extension(inline=True, notifications=False)
    return Page(conversation).chat


class Page:
    """The page of a conversation; its view is `chat`."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._open: list[pn.widgets.Button] = []
        """Visible buttons that select the better reply to the last message."""
        self.chat = _Chat(
            callback=self._answer,
            callback_user="Reply" if len(conversation.sides) == 1 else "Replies",
            user="You",
            avatar="Y",
            renderers=_text,
            message_params={"reaction_icons": {}, "show_copy_icon": False, "show_timestamp": False},
            show_activity_dot=False,
            show_rerun=False,
            show_undo=False,
            show_stop=False,
            button_properties={
                **{name: {"icon": _NONE} for name in ("rerun", "undo", "stop")},
                "send": {"icon": _SEND},
                "clear": {"icon": _CLEAR},
            },
            sizing_mode="stretch_both",
        )
        self.chat.param.watch(lambda event: None if event.new else self._restart(), "objects")

    async def _answer(self, message: str, user: str, interface: Any) -> AsyncIterator[Any]:
        """Show the replies to a message as they are generated. message: HTML, as `_text` shows it."""
        panes = [_text("") for _ in self._conversation.sides]
        buttons = [pn.widgets.Button(label="Better", visible=False) for _ in panes] if len(panes) > 1 else []
        note = _text("")
        yield self._layout(panes, buttons, note)
        # A thread generates, but only the event loop changes the page, so a browser gets the pieces in order.
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[Any, str] | None]()
        shows = [lambda text, pane=pane: loop.call_soon_threadsafe(pieces.put_nowait, (pane, text)) for pane in panes]
        replying = asyncio.create_task(asyncio.to_thread(self._conversation.ask, html.unescape(message), shows))
        replying.add_done_callback(lambda _: pieces.put_nowait(None))
        while (piece := await pieces.get()) is not None:
            pane, text = piece
            pane.object += html.escape(text)
        try:
            replies = replying.result()
        except UserError as error:
            note.object = html.escape(f"error: {error}")
            return
        if not replies:
            self._close()
            interface.clear()
            return
        for pane, reply in zip(panes, replies, strict=True):
            pane.object = html.escape(reply or "(empty reply)")
        note.object = html.escape("\n".join(dict.fromkeys(filter(None, self._conversation.remarks))))
        self._close()
        if len(set(replies)) > 1:
            self._open = buttons
            for number, button in enumerate(buttons):
                button.on_click(partial(self._prefer, number, note))
                button.visible = True
        elif buttons:
            note.object = "Both replies are equal."

    def _layout(self, panes: Sequence[Any], buttons: Sequence[Any], note: Any) -> pn.Column:
        names = [f"{number}: {side.name}" for number, side in enumerate(self._conversation.sides, 1)]
        columns = [
            pn.Column(
                _text(name, **{"font-weight": "bold"}), pane, *buttons[place : place + 1], sizing_mode="stretch_width"
            )
            for place, (name, pane) in enumerate(zip(names, panes, strict=True))
        ]
        return pn.Column(pn.Row(*columns, sizing_mode="stretch_width"), note, sizing_mode="stretch_width")

    def _prefer(self, number: int, note: Any, _: object) -> None:
        try:
            self._conversation.prefer(number)
        except UserError as error:
            note.object = html.escape(f"error: {error}")
            return
        self._close()
        note.object = html.escape(f"{number + 1} is better: saved to {self._conversation.output}.")

    def _close(self) -> None:
        for button in self._open:
            button.visible = False
        self._open = []

    def _restart(self) -> None:
        self._conversation.reset()
        self._close()


def _text(text: str, **styles: str) -> pn.pane.HTML:
    """Escaped text."""
    return pn.pane.HTML(html.escape(text), styles={**_WRAPPED, **styles}, sizing_mode="stretch_width", margin=(5, 10))


def load_sides(sources: Sequence[Path], places: Places, device: str | None) -> list[Side]:
    """Load a side for each run or checkpoint. A model that is given twice is loaded once.

    Raises:
        ConfigError: there are more than two, or a model was not trained on conversations or is a reward model.
        UserError: a part of a model is missing.
    """
    if len(sources) > MAX_RUNS:
        raise ConfigError(f"expected one or two runs, got {len(sources)}.")
    loaded, sides = dict[str, Side](), list[Side]()
    for source in sources:
        name = source_name(source, places)
        if name not in loaded:
            talk, model = load_writer(source, places)
            if not isinstance(talk, Talk):
                raise ConfigError(
                    f"{source}: the model has no chat template. To continue texts with it, use python -m "
                    "src.serving.chat."
                )
            move(model, device)
            loaded[name] = Side(name, talk)
        sides.append(loaded[name])
    return sides


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.systems.assistants.serving.page", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="MODEL", help=SOURCE)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file of choices, appended to (default: preferences.jsonl in --data_path)",
    )
    add_options(parser)
    add_address(parser, PORT, "anyone with the token can chat and choose replies")
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    import torch

    options, output = generation_options(args), args.output or args.data_path / "preferences.jsonl"
    sides, lock = load_sides(args.runs, Places(args.data_path, args.savedir_base), args.device), Lock()
    if len(sides) > 1:
        check_output(output)
    torch.manual_seed(args.seed)
    serve_page(lambda: make_page(Conversation(sides, output, lock, options)), args, "Conversation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
