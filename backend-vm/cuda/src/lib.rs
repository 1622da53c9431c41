//! The CUDA device: the real driver, loaded at run time.
