//! Runs with options from a file.

use std::ffi::OsStr;
use std::fs;
use std::process::Command;

use crate::harness::{Finished, alone, finish, wormhole};

/// Runs `wormhole run` with a file of this text.
fn run(text: &str, arguments: &[&str]) -> Finished {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("run.toml"), text).expect("room");
    let mut command = wormhole(&["run", "--config", "run.toml"]);
    finish(command.args(arguments).current_dir(folder.path()))
}

/// Prints two variables and the arguments of the shell.
const SHOW: &str = r#"
placement = "process"
quiet = true
command = ["/bin/sh", "-c", 'echo "$ONE $TWO $*"', "sh", "--config"]

[env]
ONE = "of the file"
TWO = 2
"#;

fn prints(run: &Finished, words: &str) {
    assert!(run.status.success(), "{}", run.stderr);
    assert_eq!((run.stdout.trim_end(), &*run.stderr), (words, ""));
}

#[test]
fn a_file_says_what_the_flags_say() {
    prints(&run(SHOW, &[]), "of the file 2 --config");
    prints(&run(SHOW, &["--"]), "of the file 2 --config");
}

#[test]
fn the_command_line_wins_over_the_file() {
    let given = ["--env", "ONE=given"];
    prints(&run(SHOW, &given), "given 2 --config");
    prints(&run(SHOW, &["--", "/bin/echo", "another"]), "another");
    let other = SHOW.replace("process", "host");
    let given = ["--placement", "process"];
    prints(&run(&other, &given), "of the file 2 --config");
    // A backend of the command line also takes the place of the file's device.
    let refused = run(
        "placement = \"process\"\ndevice = \"cpu:2\"",
        &["--backend", "none", "true"],
    );
    let words = "no backend none is running";
    assert!(refused.stderr.contains(words), "{}", refused.stderr);
}

#[test]
fn a_relative_path_begins_at_the_working_directory() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).expect("a folder");
    let text = "placement = \"process\"\njson = \"summary.json\"\ncommand = [\"./program\"]";
    fs::write(folder.path().join("run.toml"), text).expect("room");
    fs::copy("/bin/true", inner.join("program")).expect("room");
    let mut command = wormhole(&["run", "--config", "../run.toml"]);
    let run = finish(command.current_dir(&inner));
    assert!(run.status.success(), "{}", run.stderr);
    assert!(inner.join("summary.json").exists());
}

/// Returns the long flags that a command's help has.
fn flags(command: &[&str]) -> Vec<String> {
    let help = finish(wormhole(command).arg("--help"));
    let words = help.stdout.lines().filter_map(|line| {
        let (_, flag) = line.trim_start().split_once("--")?;
        let is_flag = line.trim_start().starts_with('-');
        let flag = flag.split([' ', '.']).next()?;
        is_flag.then(|| flag.to_owned())
    });
    let without = ["config", "help"];
    words.filter(|flag| !without.contains(&&**flag)).collect()
}

#[test]
fn every_flag_has_a_key() {
    for (command, least) in [
        (&["run"][..], 19),
        (&["backend", "start"], 11),
        (&["attach"], 5),
    ] {
        let flags = flags(command);
        assert!(flags.len() >= least, "{flags:?}");
        for flag in flags {
            let folder = tempfile::tempdir().expect("a folder");
            let file = folder.path().join("file.toml");
            // No option has a date.
            fs::write(&file, format!("{flag} = 2000-01-01")).expect("room");
            let refused = finish(wormhole(command).args([OsStr::new("--config"), file.as_ref()]));
            let words = format!("line 1: `{flag}` must be ");
            assert!(refused.stderr.contains(&words), "{}", refused.stderr);
        }
    }
}

#[test]
fn a_file_that_is_a_pipe_does_not_hold_the_command_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("it is there").success());
    let mut command = wormhole(&["run", "--config"]);
    let refused = finish(command.arg(&pipe).arg("true"));
    assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
    let words = "it is no regular file";
    assert!(refused.stderr.contains(words), "{}", refused.stderr);
}
