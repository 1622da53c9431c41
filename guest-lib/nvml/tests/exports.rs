//! The library that programs load: its names are those of the table, and of the native library.

mod support;

use std::collections::BTreeSet;

use goblin::elf::Elf;
use goblin::elf::sym::STB_GLOBAL;

#[test]
fn the_library_exports_the_names_of_the_table_and_no_others() {
    let bytes = std::fs::read(support::library()).expect("the library is built with its tests");
    let image = Elf::parse(&bytes).expect("a shared library");
    assert_eq!(image.soname, Some("libnvidia-ml.so.1"));
    let found: BTreeSet<&str> = image
        .dynsyms
        .iter()
        .filter(|symbol| symbol.st_bind() == STB_GLOBAL && !symbol.is_import())
        .filter_map(|symbol| image.dynstrtab.get_at(symbol.st_name))
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
