//! Runs the commands of README and of the pages in `docs` unchanged.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::{
    DISK_PACKAGES, PATIENCE, alone, end_by, eventually, finish, images, nothing_is_left, program,
    stage,
};
use rustix::process::Signal;

/// Place that executes a command of the pages.
enum Executed {
    /// Test of a file of this folder.
    Test(&'static str, &'static str),
    /// `xtask/src/pages.rs` names the place.
    Developer,
    /// Nothing, for this reason. Its options are parsed.
    Not(&'static str),
}

use Executed::{Developer, Not, Test};

/// Places that execute the commands with these first words. The first row that fits counts.
const COMMANDS: [(&str, Executed); 19] = [
    ("cargo xtask ", Developer),
    ("ip ", Test(NETWORK.0, NETWORK.1)),
    (
        "target/wormhole/bin/wormhole run --network tap=",
        Test(NETWORK.0, NETWORK.1),
    ),
    (
        "target/wormhole/bin/wormhole run --backend ",
        Test(
            "documents.rs",
            "a_backend_serves_by_the_commands_of_its_page",
        ),
    ),
    (
        "target/wormhole/bin/wormhole run --placement process ",
        Test("documents.rs", "programs_run_by_the_commands_of_the_pages"),
    ),
    (
        "target/wormhole/bin/wormhole run ",
        Test(
            "guest_documents.rs",
            "programs_run_in_guests_by_the_commands_of_the_pages",
        ),
    ),
    (
        "target/wormhole/bin/wormhole backend ",
        Test(
            "documents.rs",
            "a_backend_serves_by_the_commands_of_its_page",
        ),
    ),
    (
        "target/wormhole/bin/wormhole ps",
        Test(
            "documents.rs",
            "a_backend_serves_by_the_commands_of_its_page",
        ),
    ),
    (
        "target/wormhole/bin/wormhole stats ",
        Test(
            "documents.rs",
            "a_backend_serves_by_the_commands_of_its_page",
        ),
    ),
    (
        "target/wormhole/bin/wormhole attach ",
        Test(LIBVIRT.0, LIBVIRT.1),
    ),
    (
        "target/wormhole/bin/wormhole detach ",
        Test(
            "guest_of_qemu.rs",
            "guests_of_qemu_run_programs_by_the_options_of_the_page",
        ),
    ),
    ("virsh ", Test(LIBVIRT.0, LIBVIRT.1)),
    (
        "target/wormhole/bin/wormhole guest snapshot ",
        Test(SNAPSHOT.0, SNAPSHOT.1),
    ),
    (
        "target/wormhole/bin/wormhole guest start debian --restore ",
        Test(SNAPSHOT.0, SNAPSHOT.1),
    ),
    (
        "target/wormhole/bin/wormhole guest ",
        Test(
            "guest_disk.rs",
            "debian_boots_in_a_guest_and_its_user_runs_the_demo",
        ),
    ),
    (
        "target/wormhole/bin/wormhole image build backend --driver ",
        Not(
            "downloads 220 MB and compiles kernel modules for minutes; images/src/driver/tests.rs builds the parts of a made driver, and the gate refuses files that are none",
        ),
    ),
    (
        "target/wormhole/bin/wormhole image list",
        Test(
            "documents.rs",
            "images_of_the_set_up_are_found_by_the_commands_of_the_pages",
        ),
    ),
    (
        "target/wormhole/bin/wormhole image build ",
        Test(
            "documents.rs",
            "images_of_the_set_up_are_found_by_the_commands_of_the_pages",
        ),
    ),
    (
        "target/wormhole/lib/wormhole/wormhole-supervisor ",
        Test(
            "documents.rs",
            "the_supervisor_serves_by_the_command_of_its_page",
        ),
    ),
];

/// Test of a guest whose tap interface and options are those of docs/running.md.
const NETWORK: (&str, &str) = (
    "guest_network.rs",
    "a_guest_and_its_host_reach_each_other_through_a_tap_and_passt",
);

/// Test of a guest that is saved and restored as docs/guests.md says.
const SNAPSHOT: (&str, &str) = (
    "guest_snapshot.rs",
    "a_linux_guest_goes_on_where_it_was_saved",
);

/// Test that follows docs/qemu.md with a daemon of its own.
const LIBVIRT: (&str, &str) = (
    "guest_of_libvirt.rs",
    "a_domain_of_libvirt_runs_programs_as_the_page_describes_it",
);

/// Functions by which a test gets the commands of a page, with its arguments' beginning.
const READERS: [&str; 2] = ["commands_of(&", "commands_for("];

/// Languages of the pages' blocks. The test of a page's subject reads those that are not commands.
const LANGUAGES: [&str; 7] = ["json", "kernel", "qemu", "sh", "text", "toml", "xml"];

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
pub fn commands_of(page: &Path) -> Vec<String> {
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

/// Returns the number of the row of [`COMMANDS`] for a command.
fn row_of(line: &str) -> usize {
    let row = COMMANDS
        .iter()
        .position(|(begin, _)| line.starts_with(begin));
    row.unwrap_or_else(|| panic!("nothing says what executes {line}"))
}

/// Returns the commands that the test of this name executes.
pub fn commands_for(test: &str) -> impl Iterator<Item = String> {
    commands().into_iter().filter(move |line| {
        let executed = &COMMANDS[row_of(line)].1;
        matches!(executed, Test(_, name) if *name == test)
    })
}

/// Creates a folder like a user's, with an installation, a program, and the files that the pages name.
pub fn users_folder() -> tempfile::TempDir {
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
    let train = fs::read_to_string(root().join("programs/python/driver.py")).expect("a program");
    let train = train + "\nopen('/tmp/loss.csv', 'w').write('1,0.5\\n')\n";
    fs::write(at("train.py"), train).expect("a file");
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
pub fn parse(line: &str, folder: &Path) -> Command {
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
    for line in commands_for("programs_run_by_the_commands_of_the_pages") {
        if line.contains("cuda:") && !Path::new("/dev/nvidiactl").exists() {
            println!("skipped, since this machine has no NVIDIA GPU: {line}");
            continue;
        }
        let run = finish(&mut parse(&line, folder.path()));
        assert!(run.status.success(), "{line}: {}", run.stderr);
        assert!(run.stdout.contains("PASS"), "{line}: {}", run.stdout);
        executed += 1;
    }
    assert!(executed >= 3, "only {executed} commands were found");
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
    nothing_is_left();
}

/// The command takes all keys of the page's file, and then finds none of the files that it names.
#[test]
fn a_guests_configuration_on_its_page_is_read_as_far_as_the_files_that_it_names() {
    let folder = users_folder();
    let runtime = folder.path().join("guests");
    let line = "target/wormhole/bin/wormhole guest start --config debian.toml";
    let run = finish(parse(line, folder.path()).env("WORMHOLE_RUNTIME", runtime));
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    let refusal = "wormhole: cannot read vmlinuz: No such file or directory (os error 2)\n";
    assert_eq!(run.stderr, refusal);
}

/// Set-up has built the images by the functions that the commands call. A command builds no image that exists.
#[test]
fn images_of_the_set_up_are_found_by_the_commands_of_the_pages() {
    let folder = users_folder();
    let mut found = BTreeSet::new();
    let disk = images().join("guest-bookworm/disk.raw");
    for line in commands_for("images_of_the_set_up_are_found_by_the_commands_of_the_pages") {
        let of_disk = line.contains(" --suite ");
        if of_disk && !rustix::process::geteuid().is_root() {
            println!("skipped, since only root builds the disk: {line}");
            continue;
        }
        assert!(!of_disk || disk.is_file(), "set-up has built no disk");
        let mut command = parse(&line, folder.path());
        if of_disk && !line.contains(" --package ") {
            command.args(DISK_PACKAGES.iter().flat_map(|name| ["--package", name]));
        }
        let run = finish(command.env("WORMHOLE_IMAGES", images()));
        assert!(run.status.success(), "{line}: {}", run.stderr);
        if of_disk {
            // The command always says how much room the disk takes.
            assert!(!run.stderr.contains("writing"), "{line} built a disk");
            assert_eq!(Path::new(run.stdout.trim()), disk);
            continue;
        }
        assert_eq!(run.stderr, "", "{line} built an image");
        if line.ends_with(" list") {
            let has = |image| run.stdout.lines().any(|line| line.starts_with(image));
            assert!(has("backend-6.1 ") && has("guest-6.1 "), "{}", run.stdout);
            assert!(!has("guest-bookworm "), "a disk is no such image");
            continue;
        }
        let (kernel, release) = run.stdout.trim().split_once(": kernel ").expect("a kernel");
        assert!(Path::new(kernel).starts_with(images()) && Path::new(kernel).is_file());
        found.insert((kernel.to_owned(), release.to_owned()));
    }
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn each_command_of_the_pages_is_executed_or_has_a_reason() {
    let mut used = [false; COMMANDS.len()];
    for line in commands() {
        let row = row_of(&line);
        used[row] = true;
        if let Not(_) = COMMANDS[row].1 {
            let options = line.split_whitespace().skip(1);
            let mut help = Command::new(stage().join("bin/wormhole"));
            let help = help.args(options).arg("--help").output();
            let help = help.expect("it starts");
            assert!(help.status.success(), "no such command: {line}");
        }
    }
    for ((begin, executed), used) in COMMANDS.iter().zip(used) {
        assert!(used, "no page has a command that begins with {begin}");
        match executed {
            Test(file, name) => {
                let file = root().join("hypervisor/tests/runs").join(file);
                let source = fs::read_to_string(&file).expect("a file of tests");
                let test = format!("#[test]\nfn {name}() {{");
                assert!(source.contains(&test), "{} has no {name}", file.display());
                assert!(
                    READERS.iter().any(|reader| source.contains(reader)),
                    "{} takes no command from a page",
                    file.display()
                );
            }
            Developer => {}
            Not(reason) => assert!(!reason.is_empty(), "{begin}"),
        }
    }
}

/// A block without a language, or one that is indented, would not be among the [`commands`].
#[test]
fn each_block_of_the_pages_has_a_language() {
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        let fences: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("```"))
            .collect();
        for fence in fences.chunks(2) {
            let [language, ""] = fence else {
                panic!("{} has a block without an end", page.display());
            };
            assert!(
                LANGUAGES.contains(language),
                "{}: ```{language}",
                page.display()
            );
        }
        // Text is what a command prints, or a file.
        let texts = blocks_of(&page, "text").join("\n");
        let begins = ["wormhole", "target", "cargo", "ip", "virsh"];
        let is_command = |line: &&str| {
            line.split([' ', '/'])
                .next()
                .is_some_and(|word| begins.contains(&word))
        };
        let command = texts.lines().find(is_command);
        assert_eq!(command, None, "{}", page.display());
        let lines: Vec<&str> = text.lines().collect();
        let indented = lines
            .windows(2)
            .find(|pair| pair[0].is_empty() && pair[1].starts_with("    "));
        assert_eq!(indented, None, "{}", page.display());
    }
}
