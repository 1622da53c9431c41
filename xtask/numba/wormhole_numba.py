"""Pytest plugin for numba-cuda's own tests, which come without their project's conftest.py."""

import importlib
import pathlib

import pytest

SKIPPED = pathlib.Path(__file__).with_name("skipped.txt")
# The package that numba-cuda puts in the place of Numba's own `numba.cuda`.
PACKAGE = "numba_cuda"
# What came of a test, the last one of what its parts tell.
OUTCOMES = ["skipped", "passed", "failed"]


class Module(pytest.Module):
    """A module of tests by the name under which the processes that tests start can import it too."""

    def _getobj(self):
        parts = self.path.with_suffix("").parts
        last = len(parts) - 1 - parts[::-1].index(PACKAGE)
        return importlib.import_module(".".join(parts[last + 1 :]))


def pytest_collect_directory(path, parent):
    """Folders are folders: as packages they would be imported by another name."""
    return pytest.Dir.from_parent(parent, path=path)


def pytest_pycollect_makemodule(module_path, parent):
    return Module.from_parent(parent, path=module_path)


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request):
    """What the tests' base class expects of that conftest.py."""
    request.cls._dump_failed_filechecks = False


def reasons():
    """Why tests are skipped, by the end of their file's path or by `path::test`."""
    found = {}
    for line in SKIPPED.read_text().splitlines():
        if line and not line.startswith("#"):
            test, reason = line.split(": ", 1)
            found[test] = reason
    return found


def pytest_collection_modifyitems(items):
    skipped = reasons()
    for item in items:
        path = item.path.as_posix()
        name = item.nodeid.rsplit("::", 1)[-1].split("[", 1)[0]
        for test, reason in skipped.items():
            file, _, wanted = test.partition("::")
            if path.endswith("/" + file) and wanted in ("", name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_addoption(parser):
    parser.addoption("--outcomes", help="file for a line on each test: outcome, test, reason, with tabs between")


def pytest_configure(config):
    config.pluginmanager.register(Report(config.getoption("outcomes")))


class Report:
    """What came of each test, whatever the number of its subtests."""

    def __init__(self, path):
        self.path = path
        self.tests = {}

    def note(self, report):
        known = self.tests.get(report.nodeid, ("skipped", ""))
        if OUTCOMES.index(report.outcome) >= OUTCOMES.index(known[0]):
            self.tests[report.nodeid] = (report.outcome, reason(report))

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.note(report)

    def pytest_collectreport(self, report):
        if not report.passed:
            self.note(report)

    def pytest_sessionfinish(self):
        lines = [
            "\t".join((outcome, test.rsplit("/tests/", 1)[-1], reason)) + "\n"
            for test, (outcome, reason) in self.tests.items()
        ]
        pathlib.Path(self.path).write_text("".join(lines))


def reason(report):
    """In one line, why a test was skipped or failed."""
    if report.passed:
        return ""
    if hasattr(report, "wasxfail"):
        return "its authors expect it to fail"
    if isinstance(report.longrepr, tuple):
        text = report.longrepr[2].removeprefix("Skipped: ")
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr)
    return " ".join(text.split())[:200]
