"""Pytest plugin for numba-cuda's own tests, which come without their project's conftest.py."""

import importlib
import pathlib

import pytest

SKIPPED = pathlib.Path(__file__).with_name("skipped.txt")
# Package with which numba-cuda replaces Numba's own `numba.cuda`.
PACKAGE = "numba_cuda"


class Module(pytest.Module):
    """Test module with a name under which the child processes of tests can import it too."""

    def _getobj(self):
        parts = self.path.with_suffix("").parts
        last = len(parts) - 1 - parts[::-1].index(PACKAGE)
        return importlib.import_module(".".join(parts[last + 1 :]))


def pytest_collect_directory(path, parent):
    """Collects folders as plain folders; as packages they would be imported by another name."""
    return pytest.Dir.from_parent(parent, path=path)


def pytest_pycollect_makemodule(module_path, parent):
    return Module.from_parent(parent, path=module_path)


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request):
    """Sets the attribute that the tests' base class expects from the missing conftest.py."""
    request.cls._dump_failed_filechecks = False


def reasons():
    """Returns the reasons of skipped tests, by the end of their file's path or by `path::test`."""
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
