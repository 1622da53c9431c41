//! A driver's file from any bytes, which is read and unpacked.

use std::fs;
use std::path::Path;

use md5::{Digest, Md5};

use super::run_file::RunFile;

/// Version of made files.
pub(super) const VERSION: &str = "580.95.05";
/// Most bytes that are unpacked.
const MOST: u64 = 1 << 20;

/// Reads and unpacks the input as a driver's file, and as the archive of one, in an empty folder. Nothing but files and folders
/// may appear, and nothing beside the folder that they are unpacked into.
///
/// # Panics
/// That does not hold, or the folder cannot be written.
pub fn play(scratch: &Path, input: &[u8]) {
    for (name, bytes) in [
        ("whole", input.to_vec()),
        ("archive", run_file(input, |script| script)),
    ] {
        let outer = scratch.join(name);
        let (path, folder) = (outer.join("driver.run"), outer.join("unpacked"));
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(&path, &bytes).expect("room");
        match RunFile::open(&path) {
            Err(error) => _ = error.to_string(),
            Ok(file) => {
                assert_eq!(file.version.split_whitespace().count(), 1);
                if let Err(error) = file.unpack_within(&folder, MOST) {
                    _ = error.to_string();
                }
            }
        }
        assert!(bytes_below(&folder) <= MOST, "more than was allowed");
        let mut there: Vec<_> = entries(&outer).map(|entry| entry.file_name()).collect();
        there.sort();
        assert_eq!(there, ["driver.run", "unpacked"]);
        assert_eq!(fs::read(&path).expect("it is there"), bytes);
    }
    assert_eq!(entries(scratch).count(), 2);
}

fn entries(folder: &Path) -> impl Iterator<Item = fs::DirEntry> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry"))
}

/// Returns the bytes of the files below a folder, which has no other things.
fn bytes_below(folder: &Path) -> u64 {
    let bytes = entries(folder).map(|entry| {
        let metadata = entry.metadata().expect("it is there");
        assert!(metadata.is_file() || metadata.is_dir(), "{entry:?}");
        match metadata.is_dir() {
            true => bytes_below(&entry.path()),
            false => metadata.len(),
        }
    });
    bytes.sum()
}

/// Makes a script as NVIDIA's with an archive behind it. `change` changes the script before its sum is made.
pub(super) fn run_file(archive: &[u8], change: impl FnOnce(String) -> String) -> Vec<u8> {
    let script = format!(
        "#! /bin/sh\nCRCsum=1234567890\nMD5=SUM\nskip=12\nskip_decompress=11\nsize_decompress=1\n\
         label=\"NVIDIA Accelerated Graphics Driver for Linux-x86_64 {VERSION}\"\nversion_string={VERSION}\n\
         TARGET_ARCH=\"x86_64\"\n\nexit 1\n"
    );
    let script = change(script);
    // Of the file's lines from the fourth on.
    let counted = script.splitn(4, '\n').nth(3).unwrap_or_default();
    let sum: String = Md5::new()
        .chain_update(counted)
        .chain_update(archive)
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    [script.replace("SUM", &sum).as_bytes(), archive].concat()
}
