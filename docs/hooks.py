"""The hooks that mkdocs runs while it builds the site. The pages are written so that a code host shows them too, by paths of the repository:

- plots lie beside their tables in `benchmarks/results`; they become files of the site, and a link to one shows its light variant on a
  light page and its dark one on a dark page, and opens the plot in full when it is tapped;
- names of tables, as `h100/short_full.csv`, become links to the files;
- a plot of results is marked if rows of them are older than the code that they measure;
- pictures are put into the page as they are, so that they take its colours, light or dark;
- an address that the site once had leads to where its text is now.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
REPOSITORY = "https://github.com/saccade-attention/saccade/blob/main/benchmarks/results"
PLOT = re.compile(r"!\[([^\]]*)\]\((?:\.\./)*benchmarks/results/(\w+/\w+)\.png\)")
TABLE = re.compile(r"(?<!\[)`(\w+/\w+\.csv)`")
PICTURE = re.compile(r"^!\[[^\]]*\]\((?:\.\./)*pictures/(\w+\.svg)\)$", re.MULTILINE)

# an address that was -> where it leads, and by anchor where the text of that heading is
MOVED = {
    "performance.html": {
        "": "speed/index.html",
        "short-sequences": "speed/short.html",
        "129-to-577-tokens": "speed/short.html#129-to-577-tokens",
        "from-few-problems-to-many": "speed/auto.html#from-few-problems-to-many",
        "whole-encoders-by-one-line": "speed/encoders.html",
        "whole-models": "speed/models.html",
        "batches-of-different-lengths": "speed/ragged.html",
        "sliding-windows": "speed/ragged.html#sliding-windows",
        "a-bias-that-rows-share": "speed/bias.html",
        "one-query-cls-only-and-pooling": "speed/short.html#one-query-cls-only-and-pooling",
        "shapes-of-models": "speed/auto.html#shapes-of-models",
        "what-a-program-calls": "speed/auto.html",
        "dynamic-masks": "speed/dynamic_masks.html",
        "decoding": "speed/dynamic_masks.html#decoding",
        "nm-sparse-attention": "speed/nm_sparse.html",
        "with-blocks-masks-and-biases": "speed/nm_sparse.html#with-blocks-masks-and-biases",
    },
    "evidence.html": {
        "": "evidence/index.html",
        "paper-001-sparkattention": "evidence/001_sparkattention.html",
        "paper-002-fast-attention-for-short-sequences": "evidence/002_short.html",
        "paper-003-dfss-dynamic-nm-sparsity": "evidence/003_dfss.html",
        "paper-004-trainable-dynamic-masks": "evidence/004_dynamic_masks.html",
    },
}
_FORWARD = """<!doctype html><meta charset="utf-8"><title>Moved</title>
<script>const to = {places}; location.replace(to[location.hash.slice(1)] || to[""])</script>
<p>This page is now <a href="{place}">here</a>.</p>
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every plot as `plots/<gpu>/<table>.png` and `.dark.png`, and the addresses that were; this file is no part of the site."""
    for plot in sorted(RESULTS.glob("*/*.png")):
        place = f"plots/{plot.parent.name}/{plot.name}"
        files.append(File.generated(config, place, abs_src_path=str(plot)))
    for old, places in MOVED.items():
        page = _FORWARD.format(places=json.dumps(places), place=places[""])
        files.append(File.generated(config, old, content=page))
    for file in [f for f in files if "__pycache__" in f.src_uri or f.src_uri.endswith(".py")]:
        files.remove(file)
    return files


def _boost(place: str) -> float:
    if place.startswith("notes/"):
        return 0.2 if place.startswith("notes/log/") else 0.6
    return 1.0


@cache
def _stale() -> dict[str, str]:
    """The results with rows that are older than the code that they measure, as `h100/short_auto` -> how many."""
    sys.path.insert(0, str(RESULTS.parent))
    from stale import verdicts

    return {f"{x.path.parent.name}/{x.path.stem}": f"{x.stale:,} of {x.rows:,} rows" for x in verdicts() if x.is_stale}


def _mark(plot: str) -> str:
    if plot not in _stale():
        return ""
    rows = f"{_stale()[plot]} of these results are older than the code of today"
    return f"\n\n*{rows}: `python benchmarks/run.py --stale` says what has changed.*{{ .stale }}"


def _both(words: str, plot: str) -> str:
    """The two variants of a plot, each a link to itself in full. The style sheet hides one; an image that is hidden and lazy is not
    loaded."""
    variants = ((f"{plot}.png", "light"), (f"{plot}.dark.png", "dark"))
    return "".join(f"[![{words}]({file}){{ loading=lazy }}]({file}){{ .plot .on-{scheme} }}" for file, scheme in variants)


def _linked(name: str) -> str:
    """The name of a table as a link to its file, if the results hold it, and whether its rows are stale."""
    mark = f" (stale: {_stale()[table]})" if (table := name.removesuffix(".csv")) in _stale() else ""
    return f"[`{name}`]({REPOSITORY}/{name}){mark}" if (RESULTS / name).is_file() else f"`{name}`"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to plots and tables as the site has them, and pictures in place; what explains is found before what was logged."""
    page.meta.setdefault("search", {"boost": _boost(page.file.src_uri)})
    up = "../" * page.file.src_uri.count("/")
    markdown = PLOT.sub(lambda m: _both(m[1], f"{up}plots/{m[2]}") + _mark(m[2]), markdown)
    markdown = TABLE.sub(lambda m: _linked(m[1]), markdown)
    return PICTURE.sub(lambda m: f"<figure>\n{(DOCS / 'pictures' / m[1]).read_text(encoding='utf-8')}</figure>", markdown)
