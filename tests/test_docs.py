"""What the documentation shows is what happens: doctests of all modules, and the code blocks of README and docs."""

import contextlib
import doctest
import importlib
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bethenet
from bethenet.cli import app

SOURCE = Path(bethenet.__file__).parent
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_examples(text, name, namespace, line=0):
    failures = []
    example = doctest.DocTestParser().get_doctest(text, namespace, name, name, line)
    doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=failures.append, clear_globs=False)
    namespace.update(example.globs)
    assert not failures, "".join(failures)


def run_session(text):
    """Commands of `bethenet` after ``$``, each with what it writes to stdout."""
    for entry in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = entry.partition("\n")
        words = shlex.split(command)
        assert words[0] == "bethenet", command
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, result.output
        matches = doctest.OutputChecker().check_output(expected, result.stdout, OPTIONS)
        assert matches, f"{command}\nexpected:\n{expected}\nfound:\n{result.stdout}"


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    module = importlib.import_module(name)
    public = {name: getattr(bethenet, name) for name in bethenet.__all__}  # known to every example
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs=public):
        failures = []
        doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=failures.append)
        assert not failures, "".join(failures)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page, tmp_path):
    """The blocks of a page run one after another, in one namespace and one empty folder."""
    text = page.read_text()
    namespace = {"__name__": "__main__"}
    with contextlib.chdir(tmp_path):
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start(2))
            if block[1] == "console":
                run_session(block[2])
            elif ">>>" in block[2]:
                run_examples(block[2], page.name, namespace, line)
            else:
                exec(compile("\n" * line + block[2], str(page), "exec"), namespace)


def test_the_readme_has_examples_of_both_kinds():
    kinds = {block[1] for block in BLOCK.finditer((ROOT / "README.md").read_text())}
    assert kinds == {"python", "console"}


def test_links_to_files_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_page_on_engines_has_the_figures_that_were_measured():
    script = runpy.run_path(str(ROOT / "benchmarks" / "engines.py"))
    record = json.loads((ROOT / "results" / "engines" / "engines.json").read_text())
    page = (ROOT / "docs" / "inference.md").read_text()
    assert f"{script['BEGIN']}\n{script['table'](record)}{script['END']}" in page
