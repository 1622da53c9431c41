//! The library's dynamic symbols are those of the API table, and of the native driver.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::path::PathBuf;

/// Returns the path of the shared library beside this test.
fn library() -> PathBuf {
    let mut folder = std::env::current_exe().expect("the test has a path");
    folder.pop();
    let beside = folder.join("libcuda.so");
    if beside.exists() {
        return beside;
    }
    folder.pop();
    folder.join("libcuda.so")
}

fn number<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes[offset..offset + N].try_into().expect("N bytes")
}

fn word(bytes: &[u8], offset: usize) -> usize {
    usize::try_from(u64::from_le_bytes(number(bytes, offset))).expect("64 bits")
}

/// Returns the global symbols that an ELF library defines.
fn defined(image: &[u8]) -> BTreeSet<String> {
    const SYMBOLS: u32 = 11;
    let sections = word(image, 40);
    let count = usize::from(u16::from_le_bytes(number(image, 60)));
    let section = |index: usize| &image[sections + index * 64..][..64];
    let symbols = (0..count)
        .map(section)
        .find(|section| u32::from_le_bytes(number(section, 4)) == SYMBOLS)
        .expect("a shared library has dynamic symbols");
    let strings = section(u32::from_le_bytes(number(symbols, 40)) as usize);
    let names = &image[word(strings, 24)..][..word(strings, 32)];
    image[word(symbols, 24)..][..word(symbols, 32)]
        .chunks_exact(24)
        .filter(|symbol| u16::from_le_bytes(number(symbol, 6)) != 0 && symbol[4] >> 4 == 1)
        .map(|symbol| {
            let start = u32::from_le_bytes(number(symbol, 0)) as usize;
            let name = CStr::from_bytes_until_nul(&names[start..]).expect("names end");
            name.to_str().expect("names are ASCII").to_owned()
        })
        .collect()
}

#[test]
fn the_library_exports_the_names_of_the_table_and_no_others() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../shared-ring/api");
    let table = wormhole_idl::load(folder.as_ref()).expect("the table");
    let functions = table.functions.into_iter().map(|function| function.name);
    let wanted: BTreeSet<String> = functions
        .chain(table.data.into_iter().map(|data| data.name))
        .collect();
    assert_eq!(
        wanted.len(),
        707,
        "the native driver of CUDA 13.0 exports 707 names"
    );
    let found = defined(&std::fs::read(library()).expect("the library is built with its tests"));
    let missing: Vec<_> = wanted.difference(&found).collect();
    let extra: Vec<_> = found.difference(&wanted).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "missing {missing:?}, extra {extra:?}"
    );
}
