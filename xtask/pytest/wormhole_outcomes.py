"""Pytest plugin that reports the outcome of each test."""

import pathlib

# Outcomes of a test, by rank: the last one that any of its parts reports counts.
OUTCOMES = ["skipped", "passed", "failed"]


def pytest_addoption(parser):
    parser.addoption("--outcomes", help="file for a line on each test: outcome, test, reason, with tabs between")


def pytest_configure(config):
    config.pluginmanager.register(Report(config.getoption("outcomes")), "wormhole report")


class Report:
    """Collects one outcome for each test, however many subtests it has."""

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
        if not self.path:
            return
        lines = [
            "\t".join((outcome, test.rsplit("/tests/", 1)[-1], reason)) + "\n"
            for test, (outcome, reason) in self.tests.items()
        ]
        pathlib.Path(self.path).write_text("".join(lines))


def reason(report):
    """Returns the reason why a test was skipped or failed, in one line."""
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
