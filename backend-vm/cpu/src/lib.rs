//! The CPU device: PTX executed on the host's processors.
