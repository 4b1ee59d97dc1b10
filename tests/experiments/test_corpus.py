"""The text of the language models: markup, packages, the split into documents for training and for testing, token files."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "learning"))
import corpus
import strip_markup

LONG = "word " * 100


def documents(count: int = 200) -> list[corpus.Document]:
    return [corpus.Document(f"made/{i}", f"document {i} {LONG}\n") for i in range(count)]


def test_html_without_navigation():
    page = (
        "<html><head><title>no</title></head><body><div class='navheader'><p>Prev<br/>no</p></div><h1>Title</h1><p>One\n  line &amp; "
        "<code>two</code>.</p><pre>a\n   b</pre><script>no()</script><div class='navfooter'>no</div></body></html>"
    )
    assert corpus.tidy(strip_markup.from_html(page)) == "Title\n\nOne line & two.\n\na\n   b\n"


def test_rst():
    text = (
        ".. comment\n.. note::\n   :class: x\n\n   See :ref:`the page <page>` and ``code`` or `a link <url>`_ of :class:`~set`.\n"
    )
    assert strip_markup.from_rst(text) == ".. note::\n\n   See the page and code or a link of set.\n"


def test_asciidoc():
    text = "[[anchor]]\nNAME\n----\ngit-add - adds\n\n[verse]\n'git add' `-n`\n"
    assert strip_markup.from_asciidoc(text) == "NAME\ngit-add - adds\n\n'git add' -n\n"


def test_pod():
    text = "=head1 NAME\n\nUse B<C<print>> with E<lt>, see L<perlfunc/print> or L<the page|perlre>.X<gone>\n\n=over 4\n\n=item first\n\nC<< a->b >>\n\n=back\n"
    assert corpus.tidy(strip_markup.from_pod(text)) == (
        "NAME\n\nUse print with <, see perlfunc print or the page.\n\nfirst\n\na->b\n"
    )


def test_the_split_depends_on_names_alone():
    made = documents()
    train, heldout = corpus.split(made)
    again = corpus.split(reversed(made))
    assert (train, heldout) == again
    assert len(train) + len(heldout) == len(made)
    assert 2 <= len(heldout) <= 25
    # a document keeps its side whatever else there is
    assert {d.name for d in corpus.split(made[:100])[1]} == {d.name for d in heldout} & {d.name for d in made[:100]}


def test_a_repeated_text_stays_out_of_training():
    _, heldout = corpus.split(documents())
    copies = [corpus.Document(f"copy/{i}", heldout[0].text) for i in range(40)]
    assert not all(copy.held_out for copy in copies)
    train, tested = corpus.split(documents() + copies)
    assert heldout[0].text not in {d.text for d in train}
    assert [d.text for d in tested].count(heldout[0].text) == 1


def test_shared_paragraphs_are_counted():
    shared = "the same paragraph " * 10
    train = [corpus.Document("a", f"{shared}\n\n{LONG}")]
    heldout = [corpus.Document("b", f"{shared.replace(' ', chr(10))}\n\nshort\n\nanother {LONG}")]
    assert corpus.shared_paragraphs(train, heldout) == 0.5


def test_token_files_hold_the_text(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    assert corpus.main(["--quick", "--out", str(tmp_path)]) == 0
    text = corpus.load(tmp_path)
    train, heldout = corpus.split(corpus.python_reference())
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for tokens, part in ((text.train, train), (text.heldout, heldout)):
        ends = torch.nonzero(tokens == corpus.END)[:, 0].tolist()
        assert len(ends) == len(part)
        pieces = [tokens[a:b].tolist() for a, b in zip([0, *(e + 1 for e in ends)], ends, strict=False)]
        assert [tokenizer.decode(piece) for piece in pieces] == [d.text for d in part]
    # no held-out document is in the text that is trained on
    trained = tokenizer.decode(text.train.tolist())
    assert not [d.name for d in heldout if d.text in trained]
    about = json.loads((tmp_path / "corpus.json").read_text())
    assert (tmp_path / "train.bin").stat().st_size == 2 * about["train"]["tokens"]
    assert int(text.train.max()) < text.vocabulary == 512


def test_load_says_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"corpus\.json"):
        corpus.load(tmp_path)
    (tmp_path / "corpus.json").write_text(json.dumps({"vocabulary": 300, "train": {"tokens": 3}, "heldout": {"tokens": 1}}))
    (tmp_path / "train.bin").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"2 bytes; corpus\.json says 3 tokens"):
        corpus.load(tmp_path)


def test_main_says_what_is_wrong(tmp_path, capsys):
    assert corpus.main(["--packages", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "python3.11-doc_*.deb" in capsys.readouterr().err
    assert corpus.main(["--vocabulary", "100"]) == 2
    assert "--vocabulary is 100" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_reads_a_package(tmp_path):
    source = next(s for s in corpus.SOURCES if s.package == "linux-doc-6.1")
    root = tmp_path / "root"
    manual = root / "usr/share/doc/linux-doc-6.1/Documentation"
    (manual / "translations/it").mkdir(parents=True)
    (manual / "page.rst.gz").write_bytes(gzip.compress(b"``Plain`` text\n"))
    (manual / "translations/it/page.rst.gz").write_bytes(gzip.compress(b"Testo\n"))
    (manual / "image.svg").write_text("<svg/>")
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN/control").write_text(
        "Package: linux-doc-6.1\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: d\n"
    )
    deb = tmp_path / "linux-doc-6.1_1_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", str(root), str(deb)], check=True, capture_output=True)
    found = list(corpus.read_package(deb, source))
    assert [(d.name.split("/")[-1], d.text) for d in found] == [("page.rst.gz", "Plain text\n")]
    deb.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"linux-doc-6\.1_1_all\.deb cannot be read"):
        list(corpus.read_package(deb, source))
