//! Checks the names that the shared library exports against the table and the native library.

mod support;

use std::collections::BTreeSet;

use object::elf::{DT_SONAME, FileHeader64};
use object::read::elf::{Dyn, ElfFile};
use object::{Endianness, Object, ObjectSymbol};

#[test]
fn the_library_exports_the_names_of_the_table_and_no_others() {
    let bytes = std::fs::read(support::library()).expect("the library is built with its tests");
    let image = ElfFile::<FileHeader64<Endianness>>::parse(&*bytes).expect("a shared library");
    assert_eq!(soname(&image, &bytes), Some(&b"libnvidia-ml.so.1"[..]));
    let found: BTreeSet<&str> = image
        .dynamic_symbols()
        .filter(|symbol| symbol.is_global() && !symbol.is_weak() && symbol.is_definition())
        .filter_map(|symbol| symbol.name().ok())
        .collect();
    let table = support::table();
    let wanted: BTreeSet<&str> = table
        .functions
        .iter()
        .map(|function| function.name.as_str())
        .collect();
    assert_eq!(
        wanted.len(),
        404,
        "the native library of driver 580 exports 404 names"
    );
    let missing: Vec<_> = wanted.difference(&found).collect();
    let extra: Vec<_> = found.difference(&wanted).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "missing {missing:?}, extra {extra:?}"
    );
}

/// The name by which programs ask for the library.
fn soname<'data>(
    image: &ElfFile<'data, FileHeader64<Endianness>>,
    bytes: &'data [u8],
) -> Option<&'data [u8]> {
    let (endian, sections) = (image.endian(), image.elf_section_table());
    let (entries, link) = sections.dynamic(endian, bytes).ok()??;
    let strings = sections.strings(endian, bytes, link).ok()?;
    let mut names = entries
        .iter()
        .filter(|entry| entry.d_tag(endian) == u64::from(DT_SONAME));
    names.next()?.string(endian, strings).ok()
}
