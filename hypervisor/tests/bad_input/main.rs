//! What the driver library makes of bad input: each served function is called with arguments that are null,
//! destroyed, of another type, or one beyond; before `cuInit`, and after a fault.
//!
//! This executable plays both parts. As a test it runs itself, with `--run` and the specification of the calls,
//! through the staged `wormhole` on the CPU device: no call may crash the program, hang it, or end its worker,
//! and the codes must be those of `native.txt`, which a GPU's own driver gave, where that has the case.
//! By hand, on a machine with a GPU:
//!
//! ```text
//! bad_input --specification > calls.txt
//! bad_input --run calls.txt > native.txt
//! ```

mod arguments;
mod fixture;
mod library;
mod program;
mod specification;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use self::specification::Call;

const TEST: &str = "bad_input_is_an_error_and_never_a_crash";
/// What a GPU's own driver answered, where it did not crash.
const NATIVE: &str = include_str!("native.txt");
/// Cases whose answer is another one, with the reason.
const DIFFERENT: &str = include_str!("different.txt");

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("--specification") => {
            print!("{}", specification::text());
            ExitCode::SUCCESS
        }
        Some("--run") => {
            let path = arguments
                .get(1)
                .expect("--run has the file of calls behind it");
            let text = std::fs::read_to_string(path).expect("the calls can be read");
            program::run(&specification::read(&text));
            ExitCode::SUCCESS
        }
        // What `cargo test` may ask of a test executable.
        Some("--list") => {
            println!("{TEST}: test");
            ExitCode::SUCCESS
        }
        _ if excluded(&arguments) => {
            println!(
                "\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 1 filtered out\n"
            );
            ExitCode::SUCCESS
        }
        _ => judge(),
    }
}

/// Whether the arguments name other tests.
fn excluded(arguments: &[String]) -> bool {
    let mut names = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'));
    names.clone().count() > 0 && !names.any(|name| TEST.contains(name.as_str()))
}

/// Runs the calls and says what is wrong with the answers.
fn judge() -> ExitCode {
    let calls = specification::read(&specification::text());
    let output = answers();
    let found = table(&output);
    let mut wrong = Vec::new();
    for (case, answer) in &found {
        if answer.starts_with("crash") || answer.starts_with("hang") || answer.contains("then") {
            wrong.push(format!("{case}: {answer}"));
        }
    }
    let missing = calls
        .iter()
        .map(|call: &Call| format!("{} good", call.name));
    wrong.extend(
        missing
            .filter(|case| !found.contains_key(case))
            .map(|case| format!("{case}: it was not tried")),
    );
    let (native, different) = (table(NATIVE), table(DIFFERENT));
    for (case, expected) in &native {
        let Some(answer) = found.get(case) else {
            continue;
        };
        let allowed = different
            .get(case)
            .map_or(expected.as_str(), String::as_str);
        let code = |answer: &str| answer.split(' ').next().unwrap_or_default().to_owned();
        let undefined = expected.starts_with("crash") || expected.starts_with("hang");
        if !undefined && code(answer) != code(allowed) {
            wrong.push(format!("{case}: {answer}, and natively {expected}"));
        }
    }
    println!("\nrunning 1 test\n{} cases", found.len());
    for line in &wrong {
        println!("{line}");
    }
    let (word, passed) = if wrong.is_empty() {
        ("ok", 1)
    } else {
        ("FAILED", 0)
    };
    println!("test {TEST} ... {word}\n");
    println!(
        "test result: {word}. {passed} passed; {} failed; 0 ignored; 0 measured; 0 filtered out\n",
        1 - passed
    );
    ExitCode::from(u8::from(!wrong.is_empty()))
}

/// The answers of this executable, run as a guest's program.
fn answers() -> String {
    let stage = std::env::var_os("WORMHOLE_STAGE").unwrap_or_else(|| {
        panic!("WORMHOLE_STAGE is not set: run these tests by `cargo xtask test`")
    });
    let folder = tempfile::tempdir().expect("a folder for the calls");
    let calls = folder.path().join("calls.txt");
    std::fs::write(&calls, specification::text()).expect("the calls can be written");
    let output = Command::new(PathBuf::from(stage).join("bin/wormhole"))
        .args(["run", "--placement", "process", "--"])
        .arg(std::env::current_exe().expect("the test has a path"))
        .arg("--run")
        .arg(&calls)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .expect("wormhole starts");
    assert!(output.status.success(), "{:?}", output.status);
    String::from_utf8(output.stdout).expect("answers are ASCII")
}

/// Answers by their case: a line is a function, a case without spaces, and what came of it.
fn table(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let mut words = line.splitn(3, ' ');
            let case = format!("{} {}", words.next()?, words.next()?);
            Some((case, words.next()?.to_owned()))
        })
        .collect()
}
