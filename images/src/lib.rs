//! Guest and emulated-host images from Debian packages.
