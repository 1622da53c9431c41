//! Runs the commands of README and of the pages in `docs` unchanged.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::{
    PATIENCE, alone, end_by, eventually, finish, finish_at, leftovers, program, stage,
};
use rustix::process::Signal;

/// Returns the root of the sources.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the blocks of a page in a language.
pub fn blocks_of(page: &Path, language: &str) -> Vec<String> {
    let text = fs::read_to_string(page).expect("a page");
    let begin = format!("```{language}\n");
    let blocks = text.split(&begin).skip(1);
    blocks
        .map(|block| block.split("```").next().unwrap_or(block).to_owned())
        .collect()
}

/// Returns the lines of a page's shell blocks in order, without their comments.
fn commands_of(page: &Path) -> Vec<String> {
    let blocks = blocks_of(page, "sh");
    let lines = blocks.iter().flat_map(|block| block.lines());
    let commands = lines.map(|line| line.split(" #").next().unwrap_or(line).trim());
    commands
        .filter(|command| !command.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Returns README, CONTRIBUTING and the pages in `docs`.
fn pages() -> Vec<PathBuf> {
    let pages = fs::read_dir(root().join("docs")).expect("the folder of pages");
    let pages = pages.flatten().map(|entry| entry.path());
    let pages = pages.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let others = ["README.md", "CONTRIBUTING.md"].map(|name| root().join(name));
    pages.chain(others).collect()
}

/// Returns the lines of all shell blocks.
fn commands() -> BTreeSet<String> {
    pages().iter().flat_map(|page| commands_of(page)).collect()
}

/// Creates a folder like a user's, with an installation, a program, and the files that the pages name.
fn users_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("target")).expect("a folder");
    symlink(stage(), at("target/wormhole")).expect("a link");
    fs::copy(program("static", "vector_add"), at("my_program")).expect("a copy");
    for disk in ["data.img", "set.img"] {
        let disk = File::create(at(disk)).expect("a file");
        disk.set_len(1 << 20).expect("a size");
    }
    fs::write(at("settings.toml"), "").expect("a file");
    fs::write(at("input.txt"), "a line\n").expect("a file");
    fs::create_dir(at("results")).expect("a folder");
    let train = root().join("programs/python/driver.py");
    fs::copy(train, at("train.py")).expect("a copy");
    let mut configurations = 0;
    for text in pages().iter().flat_map(|page| blocks_of(page, "toml")) {
        // The first line names the file.
        let name = text.lines().next().and_then(|line| line.strip_prefix("# "));
        fs::write(at(name.expect("a name")), &text).expect("a file");
        configurations += 1;
    }
    assert!(configurations >= 2, "only {configurations} were found");
    folder
}

/// Parses a command of a page for execution in this folder. The command has no quotes and at most one redirection, of
/// standard input.
fn parse(line: &str, folder: &Path) -> Command {
    let (words, input) = line.split_once(" < ").unwrap_or((line, "/dev/null"));
    let mut words = words.split_whitespace();
    let mut command = Command::new(folder.join(words.next().expect("a command")));
    let input = File::open(folder.join(input)).expect("the input that the page names");
    command.args(words).stdin(input).current_dir(folder);
    command
}

#[test]
fn programs_run_by_the_commands_of_the_pages() {
    let _alone = alone();
    let folder = users_folder();
    let mut executed = 0;
    for line in commands() {
        // Those with a backend that is there have a test of their own.
        if !line.starts_with("target/wormhole/bin/wormhole run ") || line.contains("--backend") {
            continue;
        }
        if line.contains("cuda:") && !Path::new("/dev/nvidiactl").exists() {
            println!("skipped, since this machine has no NVIDIA GPU: {line}");
            continue;
        }
        let in_guest = !line.contains("--placement process");
        let run = finish_at(&mut parse(&line, folder.path()), in_guest);
        assert!(run.status.success(), "{line}: {}", run.stderr);
        assert!(run.stdout.contains("PASS"), "{line}: {}", run.stdout);
        executed += 1;
    }
    assert!(executed >= 6, "only {executed} commands were found");
    let summary = fs::read_to_string(folder.path().join("summary.json"));
    let summary = summary.expect("a page has a command with --json");
    assert!(summary.contains("\"requests\""), "{summary}");
}

#[test]
fn the_supervisor_serves_by_the_command_of_its_page() {
    let folder = users_folder();
    let found = commands();
    let line = found
        .iter()
        .find(|line| line.starts_with("target/wormhole/lib/wormhole/wormhole-supervisor "))
        .expect("docs/tenants.md has the command");
    let mut command = parse(line, folder.path());
    let mut supervisor = command.stderr(Stdio::piped()).spawn().expect("it starts");
    let socket = folder.path().join("backend.socket");
    eventually("the socket, or a refusal", PATIENCE, || {
        socket.exists() || supervisor.try_wait().is_ok_and(|status| status.is_some())
    });
    if socket.exists() {
        end_by(&mut supervisor, Signal::TERM);
        return;
    }
    // Without a cgroup the supervisor refuses to start, as the page says.
    let refused = supervisor.wait_with_output().expect("it has ended");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("cgroup"), "{said}");
}

#[test]
fn a_backend_serves_by_the_commands_of_its_page() {
    let _alone = alone();
    let folder = users_folder();
    let lines = commands_of(&root().join("docs/backends.md"));
    let runs = lines.iter().filter(|line| line.contains(" run "));
    assert!(runs.count() > 0, "{lines:?}");
    for line in lines {
        let mut command = parse(&line, folder.path());
        let run = finish(command.env("WORMHOLE_RUNTIME", folder.path().join("backends")));
        assert!(run.status.success(), "{line}: {}", run.stderr);
        let passes = run.stdout.contains("PASS");
        assert_eq!(passes, line.contains(" run "), "{line}: {}", run.stdout);
    }
    eventually("the backend's end", PATIENCE, || leftovers().is_empty());
}

#[test]
fn the_pages_name_commands_that_there_are() {
    for line in commands() {
        let mut words = line.split_whitespace();
        let known = match words.next() {
            // `xtask/src/pages.rs` says what executes these.
            Some("cargo") => true,
            Some("target/wormhole/bin/wormhole") => {
                let words: Vec<&str> = words.collect();
                match words[0] {
                    "run" => true,
                    // Images are built from Debian's archive, which tests do not need, so only their options are
                    // parsed here. `cargo xtask setup` builds the same images.
                    _ => Command::new(stage().join("bin/wormhole"))
                        .args(&words)
                        .arg("--help")
                        .output()
                        .expect("it starts")
                        .status
                        .success(),
                }
            }
            // `libvirt.rs` executes these with a daemon of its own.
            Some("virsh") => true,
            Some("target/wormhole/lib/wormhole/wormhole-supervisor") => true,
            _ => false,
        };
        assert!(known, "no such command: {line}");
    }
}
