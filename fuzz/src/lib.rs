//! Fuzz targets, a module each: `run` takes any bytes, and panics where something does not hold.
//!
//! Ordinary tests replay the corpora through them (`tests/corpus.rs`), and programs in `fuzz_targets` give them to libFuzzer.

pub mod api_decode;
pub mod control_decode;
pub mod cuda_image;
pub mod driver_file;
pub mod fatbin;
pub mod fuse_changes;
pub mod fuse_requests;
pub mod pair_decode;
pub mod passthrough;
pub mod ptx;
pub mod ptx_run;
pub mod report;
pub mod ring_consumer;
pub mod serial;
pub mod snapshot;
pub mod supervisor;
pub mod virtio_pci;
pub mod virtio_queues;

/// Returns the text that the input begins with.
fn text_of(input: &[u8]) -> &str {
    let first = input.utf8_chunks().next();
    first.map_or("", |chunk| chunk.valid())
}

/// Returns the number of this process's open descriptors.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// The part of an input that no step has taken yet.
struct Steps<'a>(&'a [u8]);

impl<'a> Steps<'a> {
    fn next<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    /// Takes the next `length` bytes, or fewer at the end.
    fn take(&mut self, length: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        bytes
    }
}
