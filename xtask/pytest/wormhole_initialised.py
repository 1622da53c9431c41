"""Pytest plugin that initialises the driver: some tests ask for attributes of the device before any has done so."""

import ctypes

ctypes.CDLL("libcuda.so.1").cuInit(0)
