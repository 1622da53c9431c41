"""Pytest plugin that initialises the driver, because some tests query device attributes before any test has done so."""

import ctypes

ctypes.CDLL("libcuda.so.1").cuInit(0)
