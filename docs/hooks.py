"""What mkdocs runs while it builds the site: the plots that lie beside their tables become files of the site, `plots/<gpu>/<table>.png`."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every plot of `benchmarks/results`, so that a page can show it by a relative link that is checked."""
    for plot in sorted(RESULTS.glob("*/*.png")):
        place = f"plots/{plot.parent.name}/{plot.name}"
        files.append(File.generated(config, place, abs_src_path=str(plot)))
    # not pages of the site: this file
    for file in list(files):
        if file.src_uri.endswith(".py") or "__pycache__" in file.src_uri:
            files.remove(file)
    return files
