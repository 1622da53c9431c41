//! The CUDA driver API table and its wire messages.
