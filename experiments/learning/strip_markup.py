"""Plain text out of the four markups in which the manuals of `corpus.py` are written. Nearly all that is lost is markup: a
language model needs text that reads on, not a faithful rendering."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_SKIPPED = ("script", "style", "head")
_NAVIGATION = {"navheader", "navfooter", "docnav"}
_NAVIGATION_IDS = {"banner", "title"}
_VOID = ("area", "base", "br", "col", "hr", "img", "input", "link", "meta", "wbr")
_BLOCKS = {"p", "div", "li", "tr", "pre", "table", "dt", "dd", "ul", "ol", "dl", "br", *(f"h{n}" for n in range(1, 7))}
_ESCAPES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}


class _Html(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.skipping = 0  # open tags from the first that is skipped
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        hidden = tag in _SKIPPED or given.get("class") in _NAVIGATION or given.get("id") in _NAVIGATION_IDS
        if tag not in _VOID and (self.skipping or hidden):
            self.skipping += 1
        self.verbatim += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID and self.skipping:
            self.skipping -= 1
        self.verbatim -= tag == "pre"
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.pieces.append(data if self.verbatim else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS and not self.skipping:
            self.pieces.append("\n\n" if tag in ("p", "pre") or tag.startswith("h") else "\n")


def from_html(text: str) -> str:
    """The text of the body without navigation; blocks begin lines, `pre` keeps its own. Tags must be closed, as in XHTML."""
    parser = _Html()
    parser.feed(text)
    lines = "".join(parser.pieces).split("\n")
    return "\n".join(line.removeprefix(" ") if not line.startswith("  ") else line for line in lines)


def from_rst(text: str) -> str:
    """Without comments, targets and options of directives; roles and literals become their text."""
    text = re.sub(r"^\.\. (?![\w:-]+::).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^( +):[\w-]+:.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r":[\w:+-]+:`[!~]?([^`<]*?)(?: *<[^`>]*>)?`", r"\1", text)
    return re.sub(r"``([^`]+)``|`([^`<]+?)(?: *<[^`>]*>)?`_{0,2}", lambda found: found[1] or found[2], text)


def from_asciidoc(text: str) -> str:
    """Without anchors, attributes and rulers; quoted words become themselves."""
    text = re.sub(
        r"^(\[\[.*\]\]|\[[^\]\n]*\]|ifdef::.*|ifndef::.*|endif::.*|include::.*|[-=~^+.*]{4,}|\+)\n", "", text, flags=re.MULTILINE
    )
    return re.sub(r"`([^`\n]+)`", r"\1", text)


def from_pod(text: str) -> str:
    """Paragraphs of POD without commands; codes such as C<...> become their text."""
    text = re.sub(r"^=(begin|for)\b.*?(^=end.*?$|\n\n)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^=(head\d|item) +", "", text, flags=re.MULTILINE)
    text = re.sub(r"^=(over|back|cut|pod|encoding|item|end)\b.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"E<(\w+)>", lambda found: f"\0{found[1]}\0", text)
    text = re.sub(r"\b[A-Z](<{2,4}) (.*?) >{2,4}", r"\2", text, flags=re.DOTALL)
    for _ in range(3):  # codes lie in codes, seldom deeper than three
        text = re.sub(r"\b([BCFISX])<([^<>]*)>", lambda found: "" if found[1] == "X" else found[2], text)
        text = re.sub(r"\bL<(?:([^<>|]*)\|)?([^<>|]*)>", lambda found: found[1] or found[2].replace("/", " "), text)
    return re.sub("\0(\\w+)\0", lambda found: _ESCAPES.get(found[1], " "), text)
