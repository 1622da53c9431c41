"""Pytest plugin that runs a share of a suite's tests and writes a journal of them. Other processes run the other shares.

`--share` names a JSON file with the plan, which `suite/process.py` writes. Each line of the journal is a word and its
values, with tabs between.
"""

import collections
import fcntl
import fnmatch
import functools
import hashlib
import json
import os
import pathlib

import pytest

# Most tests that a process claims at a time.
LARGEST = 32
# Words of errors after which a CUDA context serves no other test.
STICKY = ["illegal", "misaligned address", "device-side assert", "launch failure", "hardware stack"]
# Words that name what must not run on GPUs that others share.
BARRED = pathlib.Path(__file__).with_name("barred.txt").read_text().split()


def pytest_addoption(parser):
    parser.addoption("--share", help="file with the plan of this process")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    plan = json.loads(pathlib.Path(config.getoption("share")).read_text())
    report = config.pluginmanager.get_plugin("wormhole report")
    config.pluginmanager.register(Share(plan, report), "wormhole share")


class Share:
    """The tests of this process."""

    def __init__(self, plan, report):
        self.plan = plan
        self.report = report
        self.journal = os.open(plan["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.note("process", os.getpid())

    def note(self, *values):
        line = "\t".join(one_line(str(value)) for value in values)
        os.write(self.journal, (line + "\n").encode(errors="backslashreplace"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        deselected = collections.Counter()
        items[:] = select(items, self.plan, deselected)
        for reason, count in deselected.items():
            self.note("deselected", count, reason)
        names = "\n".join(item.nodeid for item in items)
        self.note("collected", len(items), digest(names))

    def pytest_collection_finish(self):
        for place, (outcome, reason) in self.report.tests.items():
            self.note("ended", outcome, place, reason)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        indices = self.indices(len(session.items))
        index = next(indices, None)
        while index is not None:
            # A test's fixtures are kept if the next test uses them too.
            after = next(indices, None)
            item = session.items[index]
            self.note("begun", index, item.nodeid)
            following = None if after is None else session.items[after]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            outcome, reason = self.report.tests.pop(item.nodeid, ("failed", "it reported no outcome"))
            self.note("ended", outcome, item.nodeid, reason)
            if outcome == "failed" and any(word in reason.lower() for word in STICKY):
                # Another process runs the claimed tests that are left.
                break
            index = after
        return True

    def indices(self, total):
        """Returns the places of the tests to run: those that an earlier process left, then claimed ones."""
        yield from self.plan["left"]
        while True:
            first, end = claim(self.plan["queue"], total, self.plan["jobs"])
            if first == end:
                return
            self.note("claimed", first, end)
            yield from range(first, end)


def claim(queue, total, jobs):
    """Takes the next tests of the queue, which is a file with the place of the first test that no process has taken."""
    with open(queue, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first = int(file.read())
        size = max(1, min(LARGEST, (total - first) // (4 * jobs)))
        end = min(total, first + size)
        file.seek(0)
        file.write(str(end))
    return first, end


def select(items, plan, deselected):
    """Returns the tests to run, in their order. Counts the others by reason, but for those beyond `most`."""
    chosen = []
    for item in items:
        if plan["only"] and one_line(item.nodeid) != plan["only"]:
            continue
        reason = barred(item.path) or next(
            (reason for pattern, reason in plan["deselected"] if fnmatch.fnmatchcase(item.nodeid, pattern)), None
        )
        if reason:
            deselected[reason] += 1
        else:
            chosen.append(item)
    if plan["most"] and len(chosen) > plan["most"]:
        # By digests, because every n-th test could be every test of one parameter.
        wanted = sorted(digest(item.nodeid) for item in chosen)[: plan["most"]]
        chosen = [item for item in chosen if digest(item.nodeid) <= wanted[-1]]
    return chosen


def one_line(text):
    return " ".join(text.split())


def digest(text):
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


@functools.cache
def barred(path):
    """Returns why no test of a file may run on GPUs that others share, if there is a reason."""
    text = path.read_text(errors="replace")
    return next((f"its file names {word}" for word in BARRED if word in text), None)
