"""Compares the ways of a suite by the outcomes of its tests."""

import concurrent.futures
import itertools
import time

from way import Way, interrupted


def outcomes(ways):
    """Returns a dictionary of outcomes for each way. A file or class that a way could not collect is a test that passes
    where it can be collected."""
    whole = {test for way in ways for test in way.outcomes if test not in way.places}
    collected = dict.fromkeys(whole, ("passed", ""))
    return [{**(collected if way.collected else {}), **way.outcomes} for way in ways]


def compare(ends):
    """Returns the tests that do not end alike in all ways, the number of those that do, and of those that did not end in
    each way. `ends` has a dictionary for each way."""
    tests = {test: None for ended in ends for test in ended}
    common = [test for test in tests if all(test in ended for ended in ends)]
    differ = [test for test in common if len({ended[test][0] for ended in ends}) > 1]
    return differ, len(common) - len(differ), len(tests) - len(common)


def repeat(suite, names, tests, until):
    """Runs each test alone in each way, as many at a time as the suite has jobs. Returns the outcomes by test and way,
    for those that ended in time."""
    def run(numbered, name):
        number, test = numbered
        if interrupted.is_set() or time.monotonic() > until:
            return test, name, None
        way = Way(suite, name, suite.output / "alone" / f"{number}-{folder(name)}", only=test).run(until)
        return test, name, way.outcomes.get(test)

    with concurrent.futures.ThreadPoolExecutor(suite.jobs) as pool:
        runs = pool.map(lambda pair: run(*pair), itertools.product(enumerate(tests), names))
        found = {}
        for test, name, outcome in runs:
            if outcome:
                found.setdefault(test, {})[name] = outcome
    return found


def folder(name):
    """Returns the name of a way's folder."""
    return name.replace(":", "-").replace(",", "-")


def split(tests, names, alone):
    """Separates the tests that also differ alone, or did not end alone in all ways, from those that then end alike."""
    def is_steady(test):
        found = alone.get(test, {})
        return len(found) < len(names) or len({outcome for outcome, _ in found.values()}) > 1

    steady = [test for test in tests if is_steady(test)]
    return steady, [test for test in tests if test not in steady]


def lines(tests, names, ends, alone):
    """Returns a line for each test: the test, then its end in each way, then its end alone, with tabs between."""
    def ended(outcome, reason):
        return f"{outcome}: {reason}" if reason else outcome

    found = []
    for test in tests:
        fields = [f"{name} {ended(*of_way[test])}" for name, of_way in zip(names, ends)]
        fields += [f"alone {name} {ended(*end)}" for name, end in alone.get(test, {}).items()]
        found.append("\t".join([test, *fields]))
    return found
