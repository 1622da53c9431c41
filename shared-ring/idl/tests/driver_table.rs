//! Tests of the driver API's table.

use std::collections::BTreeSet;
use std::fs;

use wormhole_idl::{FunctionBody, Table, Tested, coverage, exports, load, parse, protocol_hash};

fn read(path: &str) -> String {
    let path = format!("{}/{path}", env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn table() -> Table {
    load(concat!(env!("CARGO_MANIFEST_DIR"), "/../api").as_ref()).expect("the table")
}

fn tested() -> Tested {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../api/tested.txt");
    Tested::load(path.as_ref()).expect("the tests of functions")
}

#[test]
fn every_symbol_of_the_native_library_is_declared() {
    let table = table();
    let functions = table
        .functions
        .iter()
        .map(|function| function.name.as_str());
    let declared: BTreeSet<&str> = functions
        .chain(table.data.iter().map(|data| data.name.as_str()))
        .collect();
    let symbols = read("../api/symbols.txt");
    let native: BTreeSet<&str> = symbols.lines().collect();
    assert_eq!(native.len(), 707);
    let missing: Vec<_> = native.difference(&declared).collect();
    let invented: Vec<_> = declared.difference(&native).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "missing {missing:?}, invented {invented:?}"
    );
}

#[test]
fn every_name_is_exported_once() {
    let table = table();
    let code = exports(&table);
    for name in read("../api/symbols.txt").lines() {
        let function = code.matches(&format!(" extern \"C\" fn {name}(")).count();
        let variable = code.matches(&format!("pub static {name}: ")).count();
        assert_eq!(function + variable, 1, "{name}");
    }
}

#[test]
fn stream_functions_have_both_variants() {
    let table = table();
    for function in &table.functions {
        let FunctionBody::Forwarded(forwarded) = &function.body else {
            continue;
        };
        let variants = table
            .functions
            .iter()
            .filter(|other| matches!(&other.body, FunctionBody::PerThread(base) if *base == function.name))
            .count();
        // An earlier version of the function has a variant of its own.
        assert_eq!(variants > 0, forwarded.stream, "{}", function.name);
        let has_stream = forwarded
            .parameters
            .iter()
            .any(|parameter| parameter.name == "hStream");
        // `cuStreamDestroy` accepts no default stream; `cuLaunchGridAsync` predates per-thread default streams.
        let without = ["cuStreamDestroy_v2", "cuLaunchGridAsync"];
        assert!(
            forwarded.stream || !has_stream || without.contains(&function.name.as_str()),
            "{} takes a stream",
            function.name
        );
    }
}

#[test]
fn every_message_is_sent_by_some_function() {
    let table = table();
    // The frontend requests the description when it attaches. It fetches managed memory when the program accesses it, and
    // makes and compares mirrors then. The hash is for tests.
    let unsent = [
        "DeviceDescribe",
        "ManagedFetch",
        "ManagedMirror",
        "ManagedRefresh",
        "ProtocolHash",
    ];
    for message in &table.messages {
        let sent = table.functions.iter().any(|function| match &function.body {
            FunctionBody::Forwarded(forwarded) => forwarded.messages.contains(&message.name),
            _ => false,
        });
        assert_eq!(
            sent,
            !unsent.contains(&message.name.as_str()),
            "{}",
            message.name
        );
    }
}

#[test]
fn any_change_to_what_crosses_the_ring_changes_the_hash() {
    let text = ["types", "messages/code", "messages/memory"]
        .map(|part| read(&format!("../api/{part}.idl")));
    let text = text.concat();
    let hash = protocol_hash(&parse(&text).expect("the table"), false);
    let changes = [
        (
            "message 6 MemCopy record\n    destination address\n    source address",
            "message 6 MemCopy record\n    source address\n    destination address",
        ),
        (
            "message 3 MemAlloc request blocking\n    bytes u64",
            "message 3 MemAlloc request blocking\n    bytes u32",
        ),
        (
            "message 4 MemFree request blocking",
            "message 4 MemFree request",
        ),
        ("message 4 MemFree", "message 400 MemFree"),
        ("    height u64", "    rows u64"),
        ("    2 Half", "    3 Half"),
        ("tail data bytes max 4096", "tail data bytes max 4095"),
        ("grid u32[3] nonzero", "grid u32[3]"),
        (
            "    reserved u32\n    value u8[64]",
            "    value u8[64]\n    reserved u32",
        ),
    ];
    for (from, to) in changes {
        assert!(text.contains(from), "{from:?} is not in the table");
        let changed = parse(&text.replace(from, to)).expect("still in the language");
        assert_ne!(
            protocol_hash(&changed, false),
            hash,
            "{from:?} became {to:?}"
        );
    }
    assert_ne!(
        protocol_hash(&table(), true),
        protocol_hash(&table(), false)
    );
    for (from, to) in [
        ("message 3 MemAlloc", "/// More words.\nmessage 3 MemAlloc"),
        ("bytes u64 example 4096", "bytes u64 example 8192"),
        ("bytes u64 example 4096", "bytes u64"),
        ("max 5120 example store", "max 5120"),
    ] {
        assert!(text.contains(from), "{from:?} is not in the table");
        let changed = parse(&text.replace(from, to)).expect("still in the language");
        assert_eq!(
            protocol_hash(&changed, false),
            hash,
            "{from:?} became {to:?}"
        );
    }
}

/// Installed workers serve the protocols of their hashes alone: programs of another hash find none. So a change of the
/// hash, be it by a new name, is made on purpose.
#[test]
fn the_hash_of_the_table_is_known() {
    assert_eq!(protocol_hash(&table(), false), 0xe46d_d8de_63a4_891a);
}

#[test]
fn only_functions_that_are_served_have_tests() {
    let (table, tested) = (table(), tested());
    let text = read("../api/tested.txt");
    assert_eq!(text, tested.text(&table), "in the order of the table");
    for function in &table.functions {
        assert!(
            tested.by(&function.name).is_none() || table.forwarded(function).is_some(),
            "{} is not served",
            function.name
        );
    }
}

#[test]
fn the_coverage_page_is_up_to_date() {
    assert!(
        coverage(&table(), &tested()) == read("../../docs/api-coverage.md"),
        "run: cargo run -p wormhole-idl --example coverage > docs/api-coverage.md"
    );
}
