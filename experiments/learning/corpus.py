"""Prepares real text for `language.py` and `needle.py`: manuals in packages of Debian 12, as token files that fit into 40 MB.

    python experiments/learning/corpus.py --fetch [--packages out/packages] [--out out/corpus]    # apt-get download, then prepare
    python experiments/learning/corpus.py --quick --out out/corpus-small                          # Python's own reference, no package

The manuals of Python, Linux, PostgreSQL, Git, Perl and Debian are read out of the packages without installing them, and their markup is
taken away. A document is one file; 5 % of them, chosen by the SHA-256 of their names, are held out. A document whose text occurred before
is dropped. A byte-pair tokenizer of --vocabulary tokens is trained on the training documents alone (package `tokenizers`). The files
written are `train.bin` and `heldout.bin`, uint16 tokens with END after each document, `tokenizer.json`, and `corpus.json` with versions,
licences, bytes, tokens and SHA-256.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from strip_markup import from_asciidoc, from_html, from_pod, from_rst
from torch import Tensor

END = 0  # the token after each document
HELD_OUT = 20  # one document in so many
SHORTEST = 400  # characters; below that a file is an index or a redirection
LARGEST_COMPRESSED = 40_000_000


@dataclass(frozen=True)
class Source:
    """A package, the files in it that are read, and how."""

    package: str
    licence: str
    pattern: str
    read: Callable[[str], str]


SOURCES = (
    Source("python3.11-doc", "PSF-2.0", r"/html/_sources/.*\.rst\.txt$", from_rst),
    Source("linux-doc-6.1", "GPL-2, parts under others", r"/Documentation/(?!translations/).*\.rst\.gz$", from_rst),
    Source("postgresql-doc-15", "PostgreSQL", r"/html/.*\.html$", from_html),
    Source("git-doc", "GPL-2", r"/doc/git-doc/.*\.txt$", from_asciidoc),
    Source("perl-doc", "GPL-1+ or Artistic", r"\.pod$", from_pod),
    Source("debian-handbook", "GPL-2+ or CC-BY-SA-3.0", r"/html/en-US/.*\.html$", from_html),
)


@dataclass(frozen=True)
class Document:
    """A file of a package as plain text; `name` is the package and the path in it."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether it is for testing alone; depends on nothing but the name."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") % HELD_OUT == 0


@dataclass(frozen=True)
class Text:
    """Tokens int32 `[N]` of both parts, how many different ids there are, and a name for the CSV."""

    train: Tensor
    heldout: Tensor
    vocabulary: int
    name: str


def read_package(deb: Path, source: Source) -> Iterator[Document]:
    """The documents of a package file, read by dpkg-deb and in no order."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    found = re.search(source.pattern, member.name)
                    content = archive.extractfile(member) if found and member.isfile() else None
                    if content is not None:
                        raw = content.read()
                        plain = gzip.decompress(raw) if member.name.endswith(".gz") else raw
                        yield Document(f"{source.package}/{member.name}", tidy(source.read(plain.decode("utf-8", "ignore"))))
        except tarfile.TarError as error:
            raise ValueError(f"{deb} cannot be read as a Debian package: {error}") from error


def python_reference() -> list[Document]:
    """Python's language reference as every Python has it, one document a topic: 0.7 MB, for a try without packages."""
    from pydoc_data.topics import topics

    return [Document(f"pydoc_data/{name}", tidy(text)) for name, text in topics.items()]


def tidy(text: str) -> str:
    """No trailing spaces, no more than one empty line in a row, no tabs."""
    lines = [line.rstrip() for line in text.expandtabs(8).replace("\r\n", "\n").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held-out), each in the order of the names' SHA-256, without short and repeated texts. When a text is in both,
    the held-out one stays."""
    chosen: dict[str, Document] = {}
    by_digest = sorted(documents, key=lambda d: (not d.held_out, hashlib.sha256(d.name.encode()).digest()))
    for document in by_digest:
        if len(document.text) >= SHORTEST:
            chosen.setdefault(hashlib.sha256(document.text.encode()).hexdigest(), document)
    kept = list(chosen.values())
    return [d for d in kept if not d.held_out], [d for d in kept if d.held_out]


def train_tokenizer(documents: list[Document], vocabulary: int) -> Any:
    """A byte-level byte-pair tokenizer whose token END is no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<|end of document|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer, length=len(documents))
    return tokenizer


def encode(tokenizer: Any, documents: list[Document]) -> Tensor:
    """uint16 `[N]`, END after each document."""
    pieces: list[int] = []
    for first in track(range(0, len(documents), 64), description="tokens", transient=True):
        for encoded in tokenizer.encode_batch([d.text for d in documents[first : first + 64]], add_special_tokens=False):
            pieces += [*encoded.ids, END]
    return torch.tensor(pieces, dtype=torch.int32).to(torch.uint16)


def shared_paragraphs(train: list[Document], heldout: list[Document]) -> float:
    """The share of the held-out paragraphs of at least 100 characters that some training document has too, word for word."""
    seen = {paragraph for document in train for paragraph in _paragraphs(document)}
    tested = [paragraph for document in heldout for paragraph in _paragraphs(document)]
    return sum(paragraph in seen for paragraph in tested) / max(1, len(tested))


def _paragraphs(document: Document) -> list[str]:
    return [joined for block in document.text.split("\n\n") if len(joined := " ".join(block.split())) >= 100]


def write(documents: Iterable[Document], vocabulary: int, out: Path, packages: list[dict[str, str]]) -> dict[str, Any]:
    """Split, train the tokenizer, write the four files; what `corpus.json` holds."""
    train, heldout = split(documents)
    if not train or not heldout:
        raise ValueError(f"{len(train)} training and {len(heldout)} held-out documents; both must be at least 1")
    tokenizer = train_tokenizer(train, vocabulary)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    about: dict[str, Any] = {"vocabulary": tokenizer.get_vocab_size(), "packages": packages}
    compressed = 0
    for name, part in (("train", train), ("heldout", heldout)):
        tokens = encode(tokenizer, part)
        raw = bytes(tokens.untyped_storage())
        (out / f"{name}.bin").write_bytes(raw)
        compressed += len(gzip.compress(raw, 6))
        whole = "\f".join(d.text for d in part).encode()
        about[name] = {
            "documents": len(part),
            "bytes": len(whole),
            "tokens": len(tokens),
            "sha256": hashlib.sha256(whole).hexdigest(),
        }
    about["compressed_bytes"] = compressed
    about["paragraphs_in_training_too"] = round(shared_paragraphs(train, heldout), 4)
    (out / "corpus.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if compressed > LARGEST_COMPRESSED:
        raise ValueError(f"the token files take {compressed} bytes when compressed; they must not exceed {LARGEST_COMPRESSED}")
    return about


def name_in(folder: Path) -> str | None:
    """The name by which rows tell the corpus of a folder; None if it holds none."""
    path = folder / "corpus.json"
    return str(json.loads(path.read_text(encoding="utf-8"))["train"]["sha256"][:8]) if path.is_file() else None


def load(folder: Path) -> Text:
    """The token files of a folder."""
    if not (folder / "corpus.json").is_file():
        raise ValueError(
            f"{folder} holds no corpus.json; `python experiments/learning/corpus.py --fetch --out {folder}` prepares it"
        )
    about = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    parts = []
    for name in ("train", "heldout"):
        raw = (folder / f"{name}.bin").read_bytes()
        if len(raw) != 2 * about[name]["tokens"]:
            raise ValueError(
                f"{folder / name}.bin has {len(raw)} bytes; corpus.json says {about[name]['tokens']} tokens of 2 bytes"
            )
        parts.append(torch.frombuffer(bytearray(raw), dtype=torch.uint16).to(torch.int32))
    return Text(*parts, vocabulary=about["vocabulary"], name=about["train"]["sha256"][:8])


def bytes_of_reference() -> Text:
    """Python's reference as bytes, 1 to 256, for `--quick`: no package, no tokenizer."""
    parts = [b"\0".join(d.text.encode() for d in part) for part in split(python_reference())]
    train, heldout = (torch.frombuffer(bytearray(part), dtype=torch.uint8).to(torch.int32) for part in parts)
    return Text(train, heldout, vocabulary=256, name="reference")


def packages_in(folder: Path) -> Iterator[tuple[Path, Source]]:
    """The package file of each source; the error says which is missing."""
    for source in SOURCES:
        found = sorted(folder.glob(f"{source.package}_*.deb"))
        if len(found) != 1:
            raise ValueError(f"{folder} holds {len(found)} files {source.package}_*.deb; there must be one, --fetch gets it")
        yield found[0], source


def fetch(folder: Path) -> None:
    """`apt-get download` of the packages that the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [s.package for s in SOURCES if not list(folder.glob(f"{s.package}_*.deb"))]
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=folder, check=True)


def prepare(folder: Path, vocabulary: int, out: Path) -> dict[str, Any]:
    """Read every package and write the corpus."""
    documents: list[Document] = []
    packages = []
    for deb, source in packages_in(folder):
        documents += read_package(deb, source)
        version = subprocess.run(
            ["dpkg-deb", "-f", str(deb), "Version"], check=True, capture_output=True, text=True
        ).stdout.strip()
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        packages.append({"package": source.package, "version": version, "licence": source.licence, "sha256": digest})
    return write(documents, vocabulary, out, packages)


def main(arguments: list[str]) -> int:
    """Prepare and print what was made; an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, default=Path("out/packages"), help="folder with the .deb files")
    parser.add_argument("--fetch", action="store_true", help="download the packages that are missing there (apt-get)")
    parser.add_argument("--out", type=Path, default=Path("out/corpus"), help="folder for the token files")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="Python's own reference with 512 tokens: seconds")
    options = parser.parse_args(arguments)
    try:
        if not 257 <= options.vocabulary <= 65536:
            raise ValueError(f"--vocabulary is {options.vocabulary}; it must be from 257 (all bytes and END) to 65,536")
        if options.quick:
            about = write(python_reference(), 512, options.out, [])
        else:
            if options.fetch:
                fetch(options.packages)
            about = prepare(options.packages, options.vocabulary, options.out)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"corpus.py: {error}", file=sys.stderr)
        return 2
    table = Table("part", "documents", "bytes", "tokens", "sha256", title=f"{options.out}, {about['vocabulary']} tokens")
    for name in ("train", "heldout"):
        table.add_row(name, *(f"{about[name][key]:,}" for key in ("documents", "bytes", "tokens")), about[name]["sha256"])
    console = Console()
    console.print(table)
    console.print(f"compressed {about['compressed_bytes']:,} bytes; {about['paragraphs_in_training_too']:.2%} of the held-out paragraphs "
                  "occur in training too")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
