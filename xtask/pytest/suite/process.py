"""Processes that run the tests of a suite."""

import json
import os
import signal
import subprocess
import time

# Seconds that a process has to write the stacks of its threads, and then to end.
PATIENCE = (3, 15)
# Seconds that it has to collect its tests.
COLLECTING = 600


class Process:
    """One process, and what its journal says."""

    def __init__(self, command, environment, plan, place):
        """Starts pytest by the command. `place` is the path of the process's files, without their extensions."""
        self.log = place.with_suffix(".log")
        self.claimed = list(plan["left"])
        self.begun = {}
        self.ended = {}
        self.deselected = {}
        self.collected = None
        self.running = None
        self.stopping = None
        journal = place.with_suffix(".journal")
        # Empties the journal of an earlier run.
        journal.write_bytes(b"")
        self.journal = journal.open("rb")
        self.unread = b""
        self.tests = None
        self.since = time.monotonic()
        described = place.with_suffix(".json")
        described.write_text(json.dumps({**plan, "journal": str(journal)}))
        with self.log.open("wb") as log:
            self.launched = subprocess.Popen(
                [*command, f"--share={described}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=plan["root"],
                start_new_session=True,
            )
        self.descriptor = os.pidfd_open(self.launched.pid)

    def close(self):
        """Forgets the ended process. What tests started and left ends with a process that was stopped."""
        if self.stopping is not None:
            self.kill_all()
        self.journal.close()
        os.close(self.descriptor)
        if self.tests is not None:
            os.close(self.tests)

    def read(self):
        """Reads the new lines of the journal."""
        *lines, self.unread = (self.unread + self.journal.read()).split(b"\n")
        for line in lines:
            self.since = time.monotonic()
            word, *values = line.decode(errors="replace").split("\t")
            getattr(self, f"on_{word}")(*values)

    def on_process(self, number):
        try:
            self.tests = os.pidfd_open(int(number))
        except ProcessLookupError:
            pass

    def on_deselected(self, count, reason):
        self.deselected[reason] = int(count)

    def on_collected(self, total, digest):
        self.collected = (int(total), digest)

    def on_claimed(self, first, end):
        self.claimed.extend(range(int(first), int(end)))

    def on_begun(self, index, test):
        self.begun[int(index)] = test
        self.running = test

    def on_ended(self, outcome, test, reason):
        self.ended[test] = (outcome, reason)
        self.running = None

    def left(self):
        """Returns the places of the claimed tests that did not begin."""
        return [index for index in self.claimed if index not in self.begun]

    def is_over(self, seconds):
        """Returns whether the running test, or the end after the last one, takes longer."""
        allowed = seconds if self.collected else COLLECTING
        return time.monotonic() - self.since > allowed

    def stop(self, with_stacks):
        """Ends the process that runs the tests, so that its launcher ends as it always does. To be called again until
        the launcher has ended, which is killed if it does not end."""
        now = time.monotonic()
        if self.stopping is None:
            self.stopping = now
            if with_stacks:
                self.signal(signal.SIGABRT)
        waited = now - self.stopping
        if not with_stacks or waited > PATIENCE[0]:
            self.signal(signal.SIGKILL)
        if self.tests is None or waited > PATIENCE[1]:
            self.kill_all()

    def signal(self, number):
        if self.tests is not None:
            try:
                signal.pidfd_send_signal(self.tests, number)
            except ProcessLookupError:
                pass

    def kill_all(self):
        try:
            os.killpg(self.launched.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def last_words(self):
        """Returns the last line of the log that says something."""
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def described(status):
    """Returns how a process ended, by its status as Python or a shell give it."""
    number = -status if status < 0 else status - 128
    if number in signal.valid_signals():
        return signal.Signals(number).name
    return f"status {status}"
