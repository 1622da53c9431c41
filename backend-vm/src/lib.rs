//! The service that owns the device: supervisor and workers.
