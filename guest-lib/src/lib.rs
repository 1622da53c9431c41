//! The CUDA driver library of guests.
