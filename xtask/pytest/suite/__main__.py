"""Runs a test suite of others with pytest, natively and forwarded, and prints where the ways differ.

Needs no package but pytest. Exits with 0 if all tests end alike, or all pass where there is one way.
"""

import argparse
import os
import pathlib
import resource
import shutil
import signal
import sys
import time

sys.dont_write_bytecode = True

import differences
from way import NATIVE, Way, interrupted


def options():
    parser = argparse.ArgumentParser(prog="suite", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=existing, help="files and folders of tests")
    parser.add_argument("--way", action="append", required=True, help="native, or a device as of `wormhole run`")
    parser.add_argument("--wormhole", type=existing, help="path of `wormhole`, for devices")
    parser.add_argument("--python", default="python3", type=program, help="interpreter that has pytest")
    parser.add_argument("--jobs", type=positive, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=positive, default=90, help="seconds that each test may take")
    parser.add_argument("--limit", type=positive, help="seconds that all of it may take")
    parser.add_argument("--most", type=positive, help="run this many tests at most, spread over the suite")
    parser.add_argument("--deselect", type=pairs, default=[], dest="deselected", metavar="FILE", help="tests that do not run")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder of the results and logs")
    own, arguments = sys.argv[1:], []
    if "--" in own:
        place = own.index("--")
        own, arguments = own[:place], own[place + 1 :]
    suite = parser.parse_args(own)
    if suite.wormhole is None and set(suite.way) != {NATIVE}:
        parser.error("ways other than native need --wormhole")
    suite.arguments = arguments
    suite.output = suite.output.absolute()
    folders = [path if path.is_dir() else path.parent for path in suite.paths]
    suite.root = pathlib.Path(os.path.commonpath(folders))
    return suite


def existing(text):
    path = pathlib.Path(text).absolute()
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return path


def program(text):
    path = shutil.which(text)
    if path is None:
        raise argparse.ArgumentTypeError(f"there is no program {text}")
    return os.path.abspath(path)


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def pairs(text):
    """Reads pairs of pattern and reason. A pattern is a shell's, for all of a test's name."""
    found = []
    for line in existing(text).read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, separator, reason = line.partition(": ")
            if not separator:
                raise argparse.ArgumentTypeError(f"{text}: `{line}` has no `: ` with a reason behind it")
            found.append((pattern, reason))
    return found


def interrupt(*_):
    interrupted.set()


def main():
    suite = options()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    # Tests that crash leave no memory images.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end = time.monotonic() + suite.limit if suite.limit else float("inf")
    ways = []
    for position, name in enumerate(suite.way):
        # What a way does not need of its part is left to the next ones. The last part is for tests that differ.
        parts = len(suite.way) - position + (len(suite.way) > 1) * 0.25
        until = time.monotonic() + (end - time.monotonic()) / parts
        if interrupted.is_set():
            break
        way = Way(suite, name, suite.output / differences.folder(name)).run(until)
        (suite.output / f"{differences.folder(name)}.tsv").write_text(way.report())
        print("\n".join(way.summary()), flush=True)
        ways.append(way)
    if len(ways) < len(suite.way):
        return False
    if len(ways) > 1:
        return compare(suite, ways, end)
    ends = ways[0].outcomes
    failed = [test for test, (outcome, _) in ends.items() if outcome == "failed"]
    print("\n".join(differences.lines(failed, suite.way, [ends], {})))
    return not failed and bool(ends) and not ways[0].problems and not interrupted.is_set()


def compare(suite, ways, end):
    ends = differences.outcomes(ways)
    differ, alike, uncompared = differences.compare(ends)
    # Files that cannot be collected have no test to repeat.
    tests = [test for test in differ if all(test in way.places for way in ways)]
    alone = differences.repeat(suite, suite.way, tests, end)
    steady, unsteady = differences.split(differ, suite.way, alone)
    print(
        f"{alike} tests end alike, {len(steady)} differ, {len(unsteady)} differ in the suite, but not alone;"
        f" {uncompared} did not end in each way"
    )
    text = ""
    for title, tests in (("differ", steady), ("differ in the suite, but not alone", unsteady)):
        if tests:
            found = "\n".join(differences.lines(tests, suite.way, ends, alone))
            text += f"\n{title}:\n{found}\n"
    print(text, end="")
    (suite.output / "differences.txt").write_text(text)
    return not steady and alike > 0 and not any(way.problems for way in ways) and not interrupted.is_set()


sys.exit(0 if main() else 1)
