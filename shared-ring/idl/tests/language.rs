//! Tests of the errors that the parser reports, with their lines.

use wormhole_idl::{parse, protocol_hash};

fn refused(text: &str) -> String {
    parse(text).expect_err("it should be refused").to_string()
}

#[test]
fn an_id_is_never_used_twice() {
    assert_eq!(
        refused("message 1 First request\nmessage 1 Second request"),
        "line 2: message 1 Second repeats message 1 First"
    );
    let twice = "function 1 cuInit local\nfunction 1 cuFree local";
    assert!(refused(twice).contains("function id 1 of cuFree is used twice"));
}

#[test]
fn a_name_is_never_used_twice() {
    let message = "message 1 First request\nmessage 2 First request";
    assert!(refused(message).contains("repeats message 1 First"));
    let function = "function 1 cuInit local\nfunction 2 cuInit local";
    assert!(refused(function).contains("function cuInit is declared twice"));
    let answers =
        "function 1 cuA local\n    answers cuA 2000\nfunction 2 cuB local\n    answers cuA 2000";
    assert!(refused(answers).contains("cuB answers to"));
}

#[test]
fn a_name_must_be_one_in_rust() {
    for (text, line, name) in [
        ("message 1 a-b request", 1, "a-b"),
        ("message 1 First request\n    type u32", 2, "type"),
        ("enum First\n    1 2nd", 2, "2nd"),
        ("function 1 cuInit local\n    in fn u32", 2, "fn"),
        ("function 1 cuInit local\n    in flags u-32", 2, "u-32"),
    ] {
        let expected = format!("line {line}: {name} cannot be a name in Rust");
        assert_eq!(refused(text), expected);
    }
}

#[test]
fn the_line_and_the_word_are_named() {
    assert_eq!(
        refused("message 1 First request\n    size u63"),
        "line 2: u63 is not a type"
    );
    assert_eq!(
        refused("    size u64"),
        "line 1: an indented line before any declaration"
    );
    assert_eq!(
        refused("massage 1 First"),
        "line 1: [\"massage\", \"1\", \"First\"] declares nothing"
    );
    assert_eq!(
        refused("message 70000 Far request"),
        "line 1: 70000 is not a number that fits"
    );
    assert_eq!(
        refused("message 1 First query"),
        "line 1: message First is neither a record nor a request"
    );
}

#[test]
fn fields_come_before_tails() {
    let text = "message 1 First record\n    tail data bytes max 4\n    size u64";
    assert_eq!(refused(text), "line 3: field size stands behind a tail");
}

#[test]
fn a_function_refers_only_to_what_exists() {
    assert!(
        refused("function 1 cuA record Nothing")
            .contains("cuA sends Nothing, which is not declared")
    );
    assert!(
        refused("function 1 cuA same cuB").contains("cuA refers to cuB, which is not forwarded")
    );
    let per_thread = "function 1 cuA local\nfunction 2 cuA_ptsz per-thread cuA";
    assert!(refused(per_thread).contains("cuA does not depend on a stream"));
    let newer = "function 1 cuA local\n    in a u32\n    calls cuB\nfunction 2 cuB local";
    assert!(refused(newer).contains("cuA calls cuB, which does not have all its parameters"));
    let length = "function 1 cuA local\n    in data u8[size]";
    assert!(refused(length).contains("the length of data of cuA is no parameter"));
}

#[test]
fn an_unsupported_function_says_why() {
    assert!(refused("function 1 cuA unsupported").contains("is no class of function cuA"));
}

#[test]
fn constants_and_results_are_declared_once() {
    let twice = "constants flags u32\n    1 FIRST\nconstants flags u32";
    assert_eq!(refused(twice), "line 3: constants flags are declared twice");
    assert_eq!(
        refused("constants flags u32\n    FIRST 1"),
        "line 2: FIRST is not a number that fits"
    );
    assert!(refused("constants flags f64").contains("declares nothing"));
    assert!(refused("constants flags u32 CU_ A").contains("says nothing about constants flags"));
    let results = "result 1 INVALID_VALUE invalid argument\nresult 1 OUT_OF_MEMORY out of memory";
    assert_eq!(
        refused(results),
        "line 2: result 1 OUT_OF_MEMORY does not rise"
    );
    assert!(refused("struct Pair size 8").contains("says nothing about struct Pair"));
}

#[test]
fn the_protocol_depends_on_no_constant_and_on_no_alignment_in_memory() {
    let hash = |text: &str| protocol_hash(&parse(text).expect("a table"), false);
    let pair = hash("struct Pair\n    id u64\nmessage 1 Send record\n    tail pairs Pair max 2");
    let more = "constants flags u32\n    1 FIRST\nresult 1 INVALID_VALUE invalid argument\n\
        struct Pair align 16\n    id u64\nmessage 1 Send record\n    tail pairs Pair max 2";
    assert_eq!(hash(more), pair);
    let changed = more.replace("max 2", "max 3");
    assert_ne!(hash(&changed), pair);
}

#[test]
fn a_driver_line_names_each_field_once() {
    let message = |fields: &str, driver: &str| {
        refused(&format!(
            "message 1 Ask request blocking\n{fields}  driver {driver}"
        ))
    };
    let number = "    block u32\n";
    for (fields, driver, reason) in [
        (number, "cuAsk block", "cuAsk block is no call"),
        (number, "cuAsk(1a)", "1a cannot be a name"),
        (number, "cuAsk()", "does not give block to cuAsk once"),
        (
            number,
            "cuAsk(block, block)",
            "does not give block to cuAsk once",
        ),
        (number, "cuAsk(block, grid)", "has no grid for cuAsk"),
        (
            number,
            "cuAsk(block)\n  driver cuAsk(block)",
            "calls the driver twice",
        ),
        ("    tail name bytes max 8\n", "cuAsk()", "has a tail"),
        (
            "    fence fence\n",
            "cuAsk(fence) checked",
            "fence of message Ask is no number, address or handle",
        ),
        (
            "    at address\n",
            "cuAsk(at)",
            "nothing else but numbers, or be checked",
        ),
        (
            "    new new event\n",
            "cuAsk(new)",
            "nothing else but numbers, or be checked",
        ),
        (
            "    one function\n    other pool\n",
            "cuAsk(one, other)",
            "name at most one function or pool",
        ),
    ] {
        let error = message(fields, driver);
        assert!(error.contains(reason), "{error}");
    }
    let record = "message 1 Ask record\n    block u32\n  driver cuAsk(block)";
    assert!(refused(record).contains("must be blocking"));
}

#[test]
fn an_example_fits_its_field() {
    let field = |line: &str| refused(&format!("message 1 First record\n    {line}"));
    for (line, reason) in [
        ("size u64 example", "[] is no example of field size"),
        (
            "size u64 example 1 2",
            "[\"1\", \"2\"] is no example of field size",
        ),
        (
            "size u32[2] example 1 b",
            "[\"1\", \"b\"] is no example of field size",
        ),
        (
            "tail data bytes max 4 example a b",
            "says nothing about tail data",
        ),
    ] {
        assert!(field(line).contains(reason), "{}", field(line));
    }
    let reply = refused("message 1 First request\n  reply\n    size u64 example 1");
    assert!(reply.contains("says nothing about field size"), "{reply}");
}
