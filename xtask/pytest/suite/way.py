"""Runs the tests of a suite in one way: natively, or forwarded to a device."""

import os
import pathlib
import select
import threading
import time

from process import Process, described

NATIVE = "native"
# Folder of the plugins.
PLUGINS = pathlib.Path(__file__).parent.parent
# Statuses of pytest when all tests ran: they passed, some failed, there were none.
DONE = (0, 1, 5)
# Processes in turn that may end before their first test. The tests that they would have run are then left.
FUTILE = 2
# Milliseconds after which journals are read again.
INTERVAL = 200

# Set when the user interrupts.
interrupted = threading.Event()


class Way:
    """The tests of a suite, in one way. `folder` is the folder of the way's files."""

    def __init__(self, suite, name, folder, only=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.suite = suite
        self.name = name
        self.folder = folder
        self.only = only
        self.jobs = 1 if only else suite.jobs
        self.queue = folder / "queue"
        self.queue.write_text("0")
        self.collected = set()
        self.deselected = {}
        self.outcomes = {}
        self.places = {}
        self.problems = []
        self.processes = {}
        self.started = 0

    def command(self):
        launcher = [self.suite.wormhole, "run", "--placement", "process", "--quiet", "--device", self.name, "--"]
        # A test that runs alone is collected from its file alone.
        paths = [self.suite.root / self.only.split("::")[0]] if self.only else self.suite.paths
        words = [
            *([] if self.name == NATIVE else launcher),
            self.suite.python,
            *("-m", "pytest", "--quiet", "--tb=no", "--no-summary", "-p", "no:cacheprovider"),
            *("-p", "wormhole_outcomes", "-p", "wormhole_share"),
            # Settings of the suite may lie above its tests.
            *(f"--rootdir={self.suite.root}", "--confcutdir=/"),
            *self.suite.arguments,
            *paths,
        ]
        return [str(word) for word in words]

    def environment(self):
        path = os.pathsep.join(filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")]))
        # All processes order their tests alike, and keep the modules that they compile.
        compiled = str(self.suite.output / "compiled")
        own = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
        return {**os.environ, **own}

    def start(self, futile, left):
        plan = {
            "root": str(self.suite.root),
            "queue": str(self.queue),
            "jobs": self.jobs,
            "most": self.suite.most,
            "deselected": self.suite.deselected,
            "only": self.only,
            "left": left,
        }
        place = self.folder / f"process-{self.started}"
        self.started += 1
        process = Process(self.command(), self.environment(), plan, place)
        self.processes[process] = futile

    def run(self, until):
        """Runs the tests until all have ended, or the time is over. Returns itself."""
        begin = time.monotonic()
        for _ in range(self.jobs):
            self.start(0, [])
        while self.processes:
            self.wait()
            is_over = interrupted.is_set() or time.monotonic() > until or len(self.collected) > 1
            for process in list(self.processes):
                ended = process.launched.poll() is not None
                self.read(process)
                if ended:
                    self.finish(process, is_over)
                elif is_over:
                    process.stop(with_stacks=False)
                elif process.stopping is not None or process.is_over(self.suite.seconds):
                    process.stop(with_stacks=True)
        if not self.collected and not self.problems:
            self.problems.append("no process collected the tests in the time that it had")
        if len(self.collected) > 1:
            totals = " and ".join(str(total) for total, _ in sorted(self.collected))
            self.problems.append(f"the processes collect different tests ({totals}), so that they cannot share them")
        self.seconds = time.monotonic() - begin
        return self

    def wait(self):
        poll = select.poll()
        for process in self.processes:
            poll.register(process.descriptor, select.POLLIN)
        poll.poll(INTERVAL)

    def read(self, process):
        process.read()
        if process.collected:
            self.collected.add(process.collected)
        self.deselected.update(process.deselected)
        self.places.update({test: index for index, test in process.begun.items()})
        self.outcomes.update(process.ended)

    def finish(self, process, is_over):
        """Charges the end of a process to its running test, and continues with the tests behind it."""
        futile = self.processes.pop(process)
        status = process.launched.returncode
        if not is_over:
            end = described(status)
            if process.running:
                late = f"took longer than {self.suite.seconds} s, and was ended"
                reason = late if process.stopping else f"ended its process: {end}"
                self.outcomes[process.running] = ("failed", reason)
            elif process.stopping:
                self.problems.append(f"a process ran no test, did not end either, and was ended: see {process.log}")
            elif status not in DONE:
                place = "after" if process.begun else "before"
                self.problems.append(f"a process ended {place} its tests: {end}: {process.last_words()}")
            futile = 0 if process.begun or status in DONE else futile + 1
            left = process.left()
            if futile < FUTILE and (left or self.has_more(process)):
                self.start(futile, left)
        process.close()

    def has_more(self, process):
        return process.collected is None or int(self.queue.read_text()) < process.collected[0]

    def total(self):
        return max((total for total, _ in self.collected), default=0)

    def report(self):
        """Returns a line for each test: outcome, test, reason, with tabs between."""
        tests = sorted(self.outcomes, key=lambda test: self.places.get(test, -1))
        return "".join(f"{self.outcomes[test][0]}\t{test}\t{self.outcomes[test][1]}\n" for test in tests)

    def summary(self):
        """Returns the lines to print."""
        kinds = [self.outcomes[test][0] for test in self.places if test in self.outcomes]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
        unreached = self.total() - len(kinds)
        lines = [f"{self.name}: {self.total()} tests: {counts}, {unreached} not reached; {self.seconds:.0f} s"]
        files = len(self.outcomes) - len(kinds)
        if files:
            lines.append(f"{self.name}: {files} files or classes failed or were skipped as a whole")
        for reason, count in sorted(self.deselected.items()):
            lines.append(f"{self.name}: {count} not run: {reason}")
        lines.extend(f"{self.name}: {problem}" for problem in self.problems)
        return lines
